"""The toy model with a draft on its own ranks: trees grown, verified and stored within one step.

What a step leaves for the next is kept here by row, as on a device. Where steps overlap, it is
ahead of what the host was told.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paceline.worker.config import SpecConfig
from paceline.worker.spec.limits import alloc_len_per_decode, reserve_len
from paceline.worker.step import (
    PendingStep,
    Phase,
    ReqStep,
    RowResult,
    SamplingRow,
    SpecShape,
    StepPlan,
    StepReply,
)
from tests.toy import VOCAB_SIZE, ToyExecutor, ToyGroup, next_token

CHAIN = SpecConfig(method="eagle3", num_steps=4, num_draft_tokens=5, adaptive=False)
TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8, adaptive=False)
# Its own model: slots hold single tokens, page keys are plain.
STANDALONE = SpecConfig(
    method="standalone", placement="colocated", num_steps=3, num_draft_tokens=4, adaptive=False
)


class ColocatedToyExecutor(ToyExecutor):
    """Checks besides, slot by slot, what a step may read and write, and when.

    `accept_length` says how many drafts of a row are right, of as many as there are, `spoils` which
    wrong guesses the model cannot compute. A slot of the draft holds the tokens that it was
    computed from.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_reqs: int,
        max_len: int,
        *,
        spec: SpecConfig = CHAIN,
        is_overlapped: bool = False,
        accept_length: Callable[[int], int] | None = None,
        on_collect: Callable[[StepPlan], None] | None = None,
        spoils: Callable[[Sequence[int]], bool] = lambda ids: False,
        **options: Any,  # of ToyExecutor
    ) -> None:
        reserve = reserve_len(spec, is_overlapped)
        super().__init__(num_pages, page_size, max_num_reqs, max_len + reserve, **options)
        self.is_overlapped = is_overlapped
        self.may_write: Callable[[int, int], bool] = lambda row, page: True
        self.in_flight: deque[StepPlan] = deque()
        self.max_lag = 0  # tokens that the device was ahead of the host
        self._alloc_len = alloc_len_per_decode(spec)
        self._max_topk = spec.topk
        self._shift = int(spec.method != "standalone")
        rand = random.Random(7)
        self._accept_length = accept_length or (lambda num_drafts: rand.randint(0, num_drafts))
        self._on_collect = on_collect
        self._spoils = spoils
        # Of each row: tokens with KV, and the one behind them.
        self._seq_lens: dict[int, int] = {}
        self._verified_ids: dict[int, int] = {}
        self._draft_slots: list[tuple[int, ...] | None] = [None] * len(self._slots)
        self._written: dict[int, set[tuple[int, int]]] = {}  # by step: (row, page)

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        """In the order of launches, as a device works; only `collect` tells what came of it."""
        assert len(self.in_flight) <= int(self.is_overlapped)
        self._written[plan.step_id] = set()
        reply = self.execute(plan, sampling)
        self._check_owners(plan)
        self.in_flight.append(plan)
        return _ToyPending(self, plan, reply)

    def collected(self, plan: StepPlan) -> None:
        assert self.in_flight.popleft() is plan, "steps are collected in order"
        self._check_owners(plan)
        del self._written[plan.step_id]
        if self._on_collect is not None:
            self._on_collect(plan)

    def _check_owners(self, plan: StepPlan) -> None:
        """Nobody else has what a step writes, from its launch until it is collected."""
        for row, page in self._written[plan.step_id]:
            assert self.may_write(row, page), (
                f"row {row} wrote to page {page}, which is not its own"
            )

    def _store(self, row: ReqStep) -> None:
        start = row.prefix_len
        if row.phase is Phase.SPECULATE:
            return
        self._own(row, start, start + len(row.input_ids))
        super()._store(row)

    def _answer(self, row: ReqStep, sampling: SamplingRow | None) -> RowResult:
        index = row.req_pool_index
        if row.phase is Phase.SPECULATE:
            assert sampling is not None
            return self._speculate(row, self.plans[-1].shape, sampling)
        assert not any(
            other.req_pool_index == index and other.num_logits
            for plan in self.in_flight
            for other in plan.rows
        ), "the host does not know yet where this row stands"
        if row.phase is Phase.DECODE:
            assert (row.prefix_len, row.input_ids) == (
                self._seq_lens[index],
                (self._verified_ids[index],),
            )
        result = super()._answer(row, sampling)
        stop = row.prefix_len + len(row.input_ids)
        assert row.num_logits == 0 or row.next_id == -1
        if row.num_logits:
            self._seq_lens[index] = stop
            self._verified_ids[index] = result.new_ids[-1] if result.new_ids else VOCAB_SIZE
        next_ids = result.new_ids or (row.next_id,)
        self._extend_draft(index, row.prefix_len, (*row.input_ids, *next_ids))
        return result

    def _speculate(self, row: ReqStep, shape: SpecShape | None, sampling: SamplingRow) -> RowResult:
        assert shape is not None
        index, start = row.req_pool_index, self._seq_lens[row.req_pool_index]
        root = self._verified_ids[index]
        ids = [*self._read(index, start), root]
        if root == VOCAB_SIZE:  # launched before the host knew that there is no token
            assert self.is_overlapped
            self._own(row, start, start + self._alloc_len)
            return RowResult(error="there is no root")
        self._check_known(row, start, root, ids, sampling)
        num_drafts = shape.num_draft_tokens - 1
        drafts = self._drafts(ids, min(shape.num_steps, num_drafts))
        self._own(row, start, start + max(shape.num_draft_tokens, shape.topk * shape.num_steps))
        slots = self._req_to_token[index]
        for i in range(shape.num_draft_tokens):  # those that are not accepted hold anything
            self._slots[slots[start + i]] = ([root, *drafts][i : i + 1] or [VOCAB_SIZE])[0]
        for i in range(shape.topk * shape.num_steps):
            self._draft_slots[slots[start + i]] = None
        paths = [ids + drafts[:i] for i in range(len(drafts) + 1)]
        wrong = [path for path in paths[1:] if path[-1] != next_token(path[:-1])]
        if any(self._overflows(path) or self._spoils(path) for path in wrong):
            return RowResult(error="overflow", num_proposed=num_drafts)
        new_ids: list[int] = []
        error = ""
        for path, draft in zip(paths, [*drafts, None], strict=True):
            if self._overflows(path):
                error = "overflow"
                break
            new_ids.append(next_token(path))
            if new_ids[-1] != draft:
                break
        if new_ids:
            self._seq_lens[index] = start + len(new_ids)
            self._verified_ids[index] = new_ids[-1]
            self._extend_draft(index, start, (root, *new_ids))
        accept_length = len(new_ids) - (not error)
        return RowResult(tuple(new_ids), accept_length, error, num_proposed=num_drafts)

    def _check_known(
        self, row: ReqStep, start: int, root: int, ids: list[int], sampling: SamplingRow
    ) -> None:
        """What the host says of a row against what the device knows."""
        known = sampling.prompt_ids + sampling.output_ids
        if self.is_overlapped:
            assert row.input_ids == ()
            lag = start - row.prefix_len
            assert 0 <= lag <= self._alloc_len
            self.max_lag = max(self.max_lag, lag)
            assert ids[: len(known)] == known
        else:
            assert (row.prefix_len, row.input_ids) == (start, (root,))
            assert ids == known
        slots = self._req_to_token[row.req_pool_index]
        for i in range(start):
            pair = tuple(ids[i : i + 1 + self._shift])
            assert self._draft_slots[slots[i]] == pair, f"the draft's slot {i} is stale"

    def _drafts(self, ids: list[int], depth: int) -> list[int]:
        """A chain, right as far as the script says and wrong behind."""
        num_right = min(self._accept_length(depth), depth)
        drafts: list[int] = []
        for i in range(depth):
            drafts.append((next_token(ids + drafts) + (i >= num_right)) % VOCAB_SIZE)
        return drafts

    def _read(self, index: int, stop: int) -> list[int]:
        slots = self._req_to_token[index][:stop]
        assert all(slot >= self._page_size for slot in slots), "a read of page 0"
        return [self._slots[slot] for slot in slots]

    def _extend_draft(self, index: int, start: int, ids: Sequence[int]) -> None:
        """The draft reads all but the last of `ids` from `start` on, which it sees if shifted."""
        slots = self._req_to_token[index]
        for i in range(len(ids) - 1):
            self._draft_slots[slots[start + i]] = tuple(ids[i : i + 1 + self._shift])

    def _own(self, row: ReqStep, start: int, stop: int) -> None:
        slots = self._req_to_token[row.req_pool_index]
        assert stop <= len(slots), "a write behind the row's end"
        for slot in slots[start:stop]:
            assert slot >= self._page_size, "a write to page 0"
            page = slot // self._page_size
            self._written[self.plans[-1].step_id].add((row.req_pool_index, page))


class _ToyPending:
    def __init__(self, executor: ColocatedToyExecutor, plan: StepPlan, reply: StepReply) -> None:
        self._executor = executor
        self._plan = plan
        self._reply = reply

    def collect(self) -> StepReply:
        self._executor.collected(self._plan)
        return self._reply


class ColocatedGroup(ToyGroup):
    """A step loop that leaves drafting to its executor."""

    executor: ColocatedToyExecutor

    def __init__(
        self,
        spec: SpecConfig = CHAIN,
        *,
        is_overlapped: bool = True,
        accept_length: Callable[[int], int] | None = None,
        on_collect: Callable[[StepPlan], None] | None = None,
        spoils: Callable[[Sequence[int]], bool] = lambda ids: False,
        **options: Any,  # of ToyGroup
    ) -> None:
        def make(*args: int, **changes: Any) -> ColocatedToyExecutor:
            return ColocatedToyExecutor(
                *args,
                spec=spec,
                is_overlapped=is_overlapped,
                accept_length=accept_length,
                on_collect=on_collect,
                spoils=spoils,
                **changes,
            )

        super().__init__(spec=spec, make_executor=make, **options)
        assert isinstance(self.executor, ColocatedToyExecutor)
        self.executor.may_write = self._may_write

    def _may_write(self, row: int, page: int) -> bool:
        pages = self.loop._table._pages
        is_shared = pages._pool.num_refs(page) != 1 or pages._pool.is_cached(page)
        return page in pages.pages_of(row) and not is_shared
