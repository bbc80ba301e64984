"""A toy model with a real paged memory: an executor whose answers depend on what its slots hold.

The next token is a hash of the token prefix as it is read through `req_to_token` from the slots.
A wrong page, a lost move or a stale row therefore shows as a wrong token.
"""

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.cluster.group.step_loop import NewReq, ReqEvent, StepLoop
from paceline.worker.clock import Clock, FakeClock
from paceline.worker.config import CacheConfig, SchedulerConfig, SpecConfig
from paceline.worker.spec.drafter import DraftContext, Drafter
from paceline.worker.spec.speculation_path import FinishedStep
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import (
    PendingStep,
    Phase,
    ReqId,
    ReqStep,
    RowResult,
    SamplingParams,
    SamplingRow,
    StepPlan,
    StepReply,
)

VOCAB_SIZE = 50
EOS = 0


def next_token(ids: Sequence[int]) -> int:
    """What the toy model says after `ids`: never a token of much use, but always the same."""
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def generate(prompt_ids: Sequence[int], max_tokens: int, *, eos: int | None = EOS) -> list[int]:
    """The undisturbed output."""
    ids = list(prompt_ids)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
        if ids[-1] == eos:
            break
    return ids[len(prompt_ids) :]


def long_prompt(num_tokens: int, *, min_output: int = 24, start: int = 1) -> list[int]:
    """A prompt after which the toy model does not end for `min_output` tokens."""
    for first in range(start, 10_000):
        ids = [
            first % VOCAB_SIZE,
            *(1 + (first * 7 + i) % (VOCAB_SIZE - 1) for i in range(num_tokens)),
        ]
        ids = ids[:num_tokens]
        if EOS not in generate(ids, min_output):
            return ids
    raise AssertionError("no such prompt")


class ToyExecutor:
    """Follows the contract of `ReqStep` slot by slot, and checks what a plan may not do."""

    is_overlapped = False

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_reqs: int,
        max_len: int,
        *,
        on_step: Callable[[StepPlan], None] | None = None,
        overflows: Callable[[Sequence[int]], bool] = lambda ids: False,
    ) -> None:
        """`overflows`: prefixes whose logits are NaN; one in a tree spoils the tree."""
        self.num_pages = num_pages
        self.num_heartbeats = 0
        self.plans: list[StepPlan] = []
        self._page_size = page_size
        self._slots = [-1] * ((num_pages + 1) * page_size)
        width = -(-max_len // page_size) * page_size
        self._req_to_token = [[0] * width for _ in range(max_num_reqs + 1)]
        self._on_step = on_step
        self._overflows = overflows

    def heartbeat(self) -> None:
        self.num_heartbeats += 1

    def overwrite(self, *, req_pool_index: int, position: int, token_id: int) -> None:
        """What a stray write to another req's slot would do."""
        self._slots[self._req_to_token[req_pool_index][position]] = token_id

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        return FinishedStep(self.execute(plan, sampling))

    def execute(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> StepReply:
        if self._on_step is not None:
            self._on_step(plan)
        self.plans.append(plan)
        self._check_plan(plan, sampling)
        for row in plan.rows:
            self._write_pages(row)
        for row in plan.rows:
            self._store(row)
        results = [self._answer(row, s) for row, s in zip(plan.rows, sampling, strict=True)]
        return StepReply(plan.step_id, tuple(results))

    def _check_plan(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> None:
        phases = [row.phase for row in plan.rows]
        order = [Phase.DECODE, Phase.VERIFY, Phase.SPECULATE, Phase.PREFILL]
        assert phases == sorted(phases, key=order.index)
        indices = [row.req_pool_index for row in plan.rows]
        assert len(set(indices)) == len(indices)
        assert 0 not in indices
        assert len(sampling) == len(plan.rows)

    def _write_pages(self, row: ReqStep) -> None:
        slots = self._req_to_token[row.req_pool_index]
        for i, page in enumerate(row.pages, start=row.page_start):
            assert 1 <= page <= self.num_pages
            first = i * self._page_size
            assert first + self._page_size <= len(slots)
            for offset in range(self._page_size):
                slots[first + offset] = page * self._page_size + offset
        if row.pages:  # all to the last: what lies behind was another's
            end = (row.page_start + len(row.pages)) * self._page_size
            slots[end:] = [0] * (len(slots) - end)

    def _store(self, row: ReqStep) -> None:
        slots = self._req_to_token[row.req_pool_index]
        for i, token in enumerate(row.input_ids, start=row.prefix_len + row.num_cached_nodes):
            assert slots[i] >= self._page_size, "a write to page 0"
            self._slots[slots[i]] = token

    def _answer(self, row: ReqStep, sampling: SamplingRow | None) -> RowResult:
        slots = self._req_to_token[row.req_pool_index]
        prefix = [self._slots[slot] for slot in slots[: row.prefix_len]]
        if row.num_logits == 0:
            assert sampling is None
            return RowResult()
        assert sampling is not None
        known = sampling.prompt_ids + sampling.output_ids
        if row.parents is None:
            ids = prefix + list(row.input_ids)
            assert ids == known
            if self._overflows(ids):
                return RowResult(error="overflow")
            return RowResult((next_token(ids),), 0)
        assert [*prefix, row.input_ids[0]] == known
        return self._verify(row, slots, prefix)

    def _verify(self, row: ReqStep, slots: list[int], prefix: list[int]) -> RowResult:
        assert row.parents is not None
        paths: list[list[int]] = []
        for token, parent in zip(row.input_ids, row.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else prefix), token])
        if any(self._overflows(ids) for ids in paths):
            return RowResult(error="overflow")
        path = [0]
        ids = [*prefix, row.input_ids[0]]
        new_ids = []
        while True:
            new_ids.append(next_token(ids))
            children = [i for i, parent in enumerate(row.parents) if parent == path[-1]]
            agreeing = [i for i in children if row.input_ids[i] == new_ids[-1]]
            if not agreeing:
                break
            path.append(agreeing[0])
            ids.append(new_ids[-1])
        stored = [self._slots[slots[row.prefix_len + node]] for node in path]
        for i, token in enumerate(stored):
            self._slots[slots[row.prefix_len + i]] = token
        return RowResult(tuple(new_ids), len(new_ids) - 1)


class ToyDrafter(Drafter):
    """Guesses right with some probability, in chains and trees; seeded."""

    def __init__(self, seed: int, *, topk: int = 1, hit_rate: float = 0.6) -> None:
        self._random = random.Random(seed)
        self._topk = topk
        self._hit_rate = hit_rate
        self.open_ids: set[ReqId] = set()
        self.is_shut_down = False

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        self.open_ids |= {context.req_id for context in contexts}
        return [self._tree(context) for context in contexts]

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        self.open_ids -= set(req_ids)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _tree(self, context: DraftContext) -> DraftTree | None:
        rand = self._random
        if rand.random() < 0.2:
            return None
        paths = {0: context.prompt_ids + context.output_ids}
        token_ids: list[int] = []
        parents: list[int] = []
        for node in range(1, context.max_draft_tokens):
            parent = node - 1 if self._topk == 1 else rand.randrange(max(0, node - 3), node)
            hit = rand.random() < self._hit_rate
            token = next_token(paths[parent]) if hit else rand.randrange(VOCAB_SIZE)
            if (parent, token) in zip(parents, token_ids, strict=True):
                break
            paths[node] = [*paths[parent], token]
            token_ids.append(token)
            parents.append(parent)
        return DraftTree(tuple(token_ids), tuple(parents))


class ToyGroup:
    """A step loop over a toy executor, and what its reqs were told."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        num_pages: int = 64,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        chunked_prefill_size: int = 8,
        max_model_len: int = 96,
        topk: int = 1,
        num_draft_tokens: int = 5,
        drafter: Drafter | None = None,
        enable_prefix_caching: bool = True,
        clock: Clock | None = None,
        on_step: Callable[[StepPlan], None] | None = None,
        overflows: Callable[[Sequence[int]], bool] = lambda ids: False,
        spec: SpecConfig | None = None,
        make_executor: Callable[..., ToyExecutor] = ToyExecutor,
        **options: Any,  # of StepLoop
    ) -> None:
        self.clock = clock or FakeClock()
        self.executor = make_executor(
            num_pages,
            page_size,
            max_num_seqs,
            max_model_len,
            on_step=on_step,
            overflows=overflows,
        )
        self.loop = StepLoop(
            self.executor,
            drafter,
            cache=CacheConfig(page_size=page_size, enable_prefix_caching=enable_prefix_caching),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                chunked_prefill_size=chunked_prefill_size,
            ),
            spec=spec
            or SpecConfig(
                method="none" if drafter is None else "ngram",
                topk=topk,
                num_draft_tokens=num_draft_tokens,
            ),
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            clock=self.clock,
            vocab_size=VOCAB_SIZE,
            check_invariants=True,
            **options,
        )
        self.events: dict[str, list[ReqEvent]] = {}

    def submit(
        self,
        req_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int = 16,
        *,
        output_ids: Sequence[int] = (),
        priority: int = 0,
        deadline_unix_s: float | None = None,
        **params: Any,  # of SamplingParams
    ) -> None:
        params = {"seed": 7, "temperature": 0.0, **params}
        req = NewReq(
            ReqId(req_id),
            list(prompt_ids),
            list(output_ids),
            SamplingParams(max_tokens=max_tokens, **params),
            priority,
            deadline_unix_s,
        )
        events: list[ReqEvent] = []
        self.loop.submit(req, events.append)
        self.events[req_id] = events

    def run_until_idle(self) -> int:
        """Steps until no req is left; returns how many."""
        for num_steps in range(100_000):
            if not self.loop.step_once():
                assert self.loop.is_idle, "the loop stands still with reqs left"
                return num_steps
        raise AssertionError("the loop does not come to an end")

    def output(self, req_id: str) -> list[int]:
        return [token for event in self.events[req_id] for token in event.new_ids]

    def last(self, req_id: str) -> ReqEvent:
        """The one event that ended the req."""
        *earlier, last = self.events[req_id]
        assert last.is_last
        assert not any(event.is_last for event in earlier)
        return last

    def assert_all_pages_returned(self) -> None:
        snapshot = self.loop.snapshot()
        assert snapshot.num_orphaned_pages == 0
        assert snapshot.num_free_pages + snapshot.num_cached_pages == snapshot.num_pages
