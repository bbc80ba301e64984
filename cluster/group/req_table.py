"""ReqTable: the waiting and running reqs of one group, their rows and their pages. Pure.

The step loop drives it: `add`, then `plan`, `launch` and `apply` once per step; `end` takes a req
out whatever it is doing. A step may be planned while the one before is in flight: what is certain
of that, such as how far a prompt has come, changes at launch, all else at `apply`. A req that ends
in the meantime keeps its row and pages until the steps that write there have been applied.

It knows no threads, clocks, executors or drafters.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.cluster.group.req_results import ResultRules
from paceline.cluster.group.req_state import ReqEvent, ReqState
from paceline.cluster.group.step_rows import BuiltStep, StepRow
from paceline.cluster.scheduling.planner import (
    AdmissibleReq,
    PlanLimits,
    PlannedRow,
    RunningReq,
    plan_step,
)
from paceline.cluster.scheduling.req_queue import ReqQueue, WaitingReq, sort_waiting
from paceline.worker.cache.req_pages import PageCounts, ReqPages
from paceline.worker.config import CacheConfig, SchedulerConfig
from paceline.worker.errors import ConfigError, InternalError
from paceline.worker.step import ReqId, SpecShape, StepReply

# A waiting req that has been passed over for so long goes before those of higher priority.
MAX_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class NextStep:
    """With `must_wait`, nothing was decided: collect what is in flight and plan again."""

    rows: list[StepRow]
    preempted: tuple[ReqId, ...] = ()
    shape: SpecShape | None = None  # of the rows that speculate
    must_wait: bool = False


class ReqTable:
    """All state of a group's reqs; every method leaves the page accounting exact.

    Args:
        reserve: slots that a req owns behind its committed tokens for a draft on the same ranks.
        key_shift: as of PrefixTree.

    Raises ConfigError: the pool cannot hold the shortest req and its reserve.
    """

    def __init__(
        self,
        num_pages: int,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        *,
        is_speculating: bool,
        reserve: int = 0,
        key_shift: int = 0,
    ) -> None:
        self._pages = ReqPages[int](  # by row
            num_pages,
            cache.page_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            key_shift=key_shift,
        )
        self._reserve = reserve
        # A lone req must be able to reach this length, so the pool bounds it as well.
        self.max_model_len = min(max_model_len, num_pages * cache.page_size - reserve)
        if reserve > 0 and self.max_model_len < 2:
            raise ConfigError(
                f"the cache has {num_pages} pages of {cache.page_size} tokens, but each request "
                f"needs room for {reserve} draft tokens beside its own; raise the cache size or "
                "lower num_steps, topk or num_draft_tokens"
            )
        self._rules = ResultRules(self.max_model_len, eos_token_ids, is_speculating)
        # Every running req gets a token in every step.
        self.max_num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._scheduler = scheduler
        self._reqs: dict[ReqId, ReqState] = {}
        self._running: dict[ReqId, ReqState] = {}
        self._leaving: dict[int, ReqState] = {}  # by row: ended, with a step in flight
        self._num_in_flight = 0  # steps
        self._waiting = ReqQueue()
        self._free_rows = list(range(1, self.max_num_reqs + 1))  # a heap: row 0 is padding's
        self._num_admitted = 0
        self._order: list[WaitingReq] | None = None  # of the waiting reqs, while nothing changes
        self._ordered_at_s = 0.0
        self._next_deadline_s = float("inf")

    @property
    def page_size(self) -> int:
        return self._pages.page_size

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_prompt_tokens(self) -> int:
        return self._waiting.num_prompt_tokens

    @property
    def num_available_pages(self) -> int:
        return self._pages.num_available

    @property
    def num_pending_prefill_tokens(self) -> int:
        running = self._running.values()
        pending = sum(max(req.prefill_len - req.num_computed_tokens, 0) for req in running)
        return pending + self._waiting.num_prompt_tokens

    @property
    def page_counts(self) -> PageCounts:
        return self._pages.counts()

    def running_ids(self) -> tuple[ReqId, ...]:
        return tuple(self._running)

    def waiting_ids(self) -> tuple[ReqId, ...]:
        return tuple(req.req_id for req in self._waiting)

    def get(self, req_id: ReqId) -> ReqState | None:
        return self._reqs.get(req_id)

    def add(self, req: ReqState, now_s: float) -> ReqEvent | None:
        """Lets a req wait; one that was resumed after its last token ends here and now."""
        assert req.req_id not in self._reqs, f"req {req.req_id} is here already"
        if event := self._rules.end_of_given(req, now_s):
            return event
        self._reqs[req.req_id] = req
        self._wait(req)
        if req.deadline_unix_s is not None:
            self._next_deadline_s = min(self._next_deadline_s, req.deadline_unix_s)
        return None

    def expired(self, now_unix_s: float) -> list[ReqState]:
        """Reqs whose deadline has passed."""
        if now_unix_s < self._next_deadline_s:
            return []
        timed = [(req.deadline_unix_s, req) for req in self._reqs.values()]
        left = [deadline for deadline, _ in timed if deadline is not None and deadline > now_unix_s]
        self._next_deadline_s = min(left, default=float("inf"))
        return [req for deadline, req in timed if deadline is not None and deadline <= now_unix_s]

    def end(self, req: ReqState, *, keep_prefix: bool = True) -> None:
        """Takes a req out; its computed prefix stays in the cache.

        Its row and pages come back now, or with the last step in flight that has them.
        """
        del self._reqs[req.req_id]
        if self._waiting.remove(req.req_id) is not None:
            self._order = None
            return
        del self._running[req.req_id]
        req.has_ended = True
        req.keeps_prefix = keep_prefix
        if req.num_in_flight > 0:
            self._leaving[req.req_pool_index] = req
        else:
            self._release(req)

    def end_all(self, *, keep_prefix: bool) -> list[ReqState]:
        """Ends every req, and gives up on steps in flight: nobody will apply them."""
        reqs = list(self._reqs.values())
        self._num_in_flight = 0
        for req in reqs:
            req.num_in_flight = 0
            self.end(req, keep_prefix=keep_prefix)
        for req in self._leaving.values():
            req.num_in_flight = 0
            req.keeps_prefix &= keep_prefix
            self._release(req)
        self._leaving.clear()
        return reqs

    def plan(
        self,
        num_draft_tokens: int,
        *,
        is_chain: bool,
        now_unix_s: float,
        choose_shape: Callable[[int], SpecShape] | None = None,
    ) -> NextStep:
        """Decides a step and gives its rows their pages.

        Preempted reqs wait again with all their tokens. Nobody is preempted while a step is in
        flight: what it ends may free enough, and what it has of the preempted is theirs.
        """
        step = plan_step(
            [self._view(req) for req in self._running.values()],
            self._admissible(now_unix_s),
            self._pages.num_available,
            PlanLimits(
                page_size=self._pages.page_size,
                max_num_reqs=self.max_num_reqs - len(self._leaving),
                max_num_batched_tokens=self._scheduler.max_num_batched_tokens,
                chunked_prefill_size=self._scheduler.chunked_prefill_size,
                max_num_tokens=self.max_model_len,
                num_draft_tokens=num_draft_tokens,
                is_chain=is_chain,
                reserve=self._reserve,
            ),
            lambda req_id: self._pages.num_exclusive(self._running[req_id].req_pool_index),
            choose_shape,
        )
        if step.preempted and self._num_in_flight > 0:
            return NextStep([], must_wait=True)
        for req_id in step.preempted:
            self._preempt(self._running[req_id])
        # All prefixes are taken before any page is, lest one evicts what the next was promised.
        for admitted in step.admitted:
            self._admit(admitted)
        for admitted in step.admitted:
            self._grow(self._running[admitted.req_id], admitted.num_tokens + self._reserve)
        return NextStep([self._take_row(row) for row in step.rows], step.preempted, step.shape)

    def launch(self, step: BuiltStep) -> None:
        """Notes what is certain of a step before anything came of it."""
        self._num_in_flight += 1
        for row, req_step in zip(step.rows, step.plan.rows, strict=True):
            row.req.num_in_flight += 1
            row.req.num_written_pages = len(row.pages)
            if not row.is_decoding:
                row.req.num_computed_tokens += len(req_step.input_ids)

    def apply(self, step: BuiltStep, reply: StepReply, now_s: float) -> list[ReqEvent]:
        """Commits what came of the oldest step in flight; finished reqs are gone when it returns.

        What came of reqs that ended before is dropped.

        Raises InternalError: the reply does not answer the plan.
        """
        if reply.step_id != step.plan.step_id or len(reply.rows) != len(step.rows):
            raise InternalError(
                f"step {step.plan.step_id} of {len(step.rows)} rows was answered by step "
                f"{reply.step_id} of {len(reply.rows)} rows"
            )
        self._num_in_flight -= 1
        events: list[ReqEvent] = []
        for row, req_step, result in zip(step.rows, step.plan.rows, reply.rows, strict=True):
            req = row.req
            req.num_in_flight -= 1
            if req.has_ended:
                req.keeps_prefix &= row.is_decoding or not result.error
                if req.num_in_flight == 0:
                    self._release(self._leaving.pop(req.req_pool_index))
                continue
            if req_step.num_logits == 0:
                continue
            if not row.is_decoding and not result.error:
                self._share_prompt(req)
            event = self._rules.commit(req, req_step, result, now_s)
            if event is None:
                continue
            events.append(event)
            if event.is_last:
                self.end(req, keep_prefix=event.error is None)
        return events

    def check(self) -> None:
        """Proves the invariants between steps: no page lost or shared wrongly, lengths agree."""
        self._pages.check()
        holders = [*self._running.values(), *self._leaving.values()]
        rows = [req.req_pool_index for req in holders]
        assert sorted(rows + self._free_rows) == list(range(1, self.max_num_reqs + 1))
        assert len(self._reqs) == len(self._running) + len(self._waiting)
        for req in holders:
            assert req.kv_allocated_len == self._num_owned_slots(req), (
                f"req {req.req_id} lost slots"
            )
            assert req.kv_allocated_len >= req.num_computed_tokens, f"req {req.req_id} lacks pages"
            assert req.num_in_flight <= self._num_in_flight
            assert req.has_ended == (req.req_pool_index in self._leaving)
            assert not req.has_ended or req.num_in_flight > 0, f"req {req.req_id} stays for nothing"
        for req in self._running.values():
            if req.is_decoding:
                committed = max(req.num_tokens - 1, req.prefill_len)
                assert req.num_computed_tokens == committed, f"req {req.req_id} lags"
                is_known = req.num_tokens > req.prefill_len
                assert is_known or req.num_in_flight > 0, f"req {req.req_id} lost a token"

    def _wait(self, req: ReqState) -> None:
        req.known_prefix = (-1, ())
        self._waiting.push(
            WaitingReq(
                req_id=req.req_id,
                num_prompt_tokens=req.num_tokens,
                max_tokens=req.params.max_tokens,
                priority=req.priority,
                deadline_s=req.deadline_unix_s,
                arrival_s=req.submitted_unix_s,  # also of a preempted one, which so goes first
            )
        )
        self._order = None

    def _admissible(self, now_unix_s: float) -> Iterator[AdmissibleReq]:
        """Waiting reqs in order; each is looked up in the cache when the planner gets to it."""
        if not self._free_rows or not self._waiting:
            return
        if self._order is None or now_unix_s - self._ordered_at_s > 1.0:
            self._order = sort_waiting(self._waiting, now_unix_s, max_wait_s=MAX_WAIT_S)
            self._ordered_at_s = now_unix_s
        for waiting in self._order:
            req = self._reqs[waiting.req_id]
            if req.known_prefix[0] != self._pages.num_changes:  # a long one takes a millisecond
                req.known_prefix = self._pages.num_changes, self._pages.match(req.all_ids())
            prefix = req.known_prefix[1]
            yield AdmissibleReq(
                waiting.req_id, waiting.num_prompt_tokens, prefix, self._pages.num_unused(prefix)
            )

    def _view(self, req: ReqState) -> RunningReq:
        # Each step in flight brings a token at least, unless it fails.
        num_tokens_left = self._rules.num_tokens_left(req) - req.num_in_flight
        return RunningReq(
            req_id=req.req_id,
            priority=req.priority,
            order=req.order,
            num_tokens=req.num_tokens,
            num_computed_tokens=req.num_computed_tokens,
            num_pages=len(self._pages.pages_of(req.req_pool_index)),
            num_tokens_left=num_tokens_left,
            is_decoding=req.is_decoding,
            is_waiting=req.num_in_flight > 0 and (num_tokens_left <= 0 or req.is_suspect),
            is_suspect=req.is_suspect,
        )

    def _admit(self, admitted: AdmissibleReq) -> None:
        req = self._reqs[admitted.req_id]
        self._waiting.remove(req.req_id)
        self._order = None
        self._num_admitted += 1
        if req.order == 0:  # a preempted req keeps its age, so it is not the youngest for ever
            req.order = self._num_admitted
            num_cached = len(admitted.prefix) * self._pages.page_size
            req.cached_tokens = min(num_cached, len(req.prompt_ids))
        req.req_pool_index = heapq.heappop(self._free_rows)
        self._pages.open(req.req_pool_index, admitted.prefix)
        req.prefill_len = req.num_tokens
        req.num_computed_tokens = len(admitted.prefix) * self._pages.page_size
        req.num_written_pages = 0
        req.accept_length = 0
        req.is_suspect = False
        self._running[req.req_id] = req

    def _preempt(self, req: ReqState) -> None:
        del self._running[req.req_id]
        self._release(req)
        req.num_preemptions += 1
        self._wait(req)

    def _release(self, req: ReqState) -> None:
        """The one way out for a row and its pages; nothing of the req is in flight any more.

        Two numbers say it all: the full pages up to `kv_committed_len` go to the prefix cache, all
        others up to `kv_allocated_len` back to the pool.
        """
        assert req.num_in_flight == 0, f"req {req.req_id} is in flight"
        assert req.kv_allocated_len == self._num_owned_slots(req), f"req {req.req_id} lost slots"
        committed_len = req.kv_committed_len if req.keeps_prefix else 0
        self._pages.close(req.req_pool_index, req.all_ids(), committed_len)
        heapq.heappush(self._free_rows, req.req_pool_index)
        req.req_pool_index = req.num_computed_tokens = req.kv_allocated_len = 0

    def _take_row(self, row: PlannedRow) -> StepRow:
        req = self._running[row.req_id]
        num_tokens = row.num_tokens if self._reserve == 0 else self._reserve
        if row.is_decoding:
            self._grow(req, req.num_computed_tokens + num_tokens)
        pages = self._pages.pages_of(req.req_pool_index)
        return StepRow(req, pages, row.num_tokens, row.is_decoding, row.is_speculating)

    def _grow(self, req: ReqState, num_tokens: int) -> None:
        self._pages.grow(req.req_pool_index, num_tokens)
        req.kv_allocated_len = self._num_owned_slots(req)

    def _num_owned_slots(self, req: ReqState) -> int:
        return len(self._pages.pages_of(req.req_pool_index)) * self._pages.page_size

    def _share_prompt(self, req: ReqState) -> None:
        """Lets others use the full pages of a prompt, and takes theirs for its own.

        The step in flight may read what is given back so, but writes only behind the prompt; on
        the device whoever gets these pages next comes after it.
        """
        row = req.req_pool_index
        first_changed = self._pages.keep_prefix(row, req.all_ids(), req.prefill_len)
        req.num_written_pages = min(req.num_written_pages, first_changed)
