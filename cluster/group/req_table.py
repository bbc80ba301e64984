"""ReqTable: the waiting and running reqs of one group, their rows and their pages. Pure.

The step loop drives it: `add`, then `plan` and `apply` once per step; `end` takes a req out
whatever it is doing. It knows no threads, clocks, executors or drafters.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from paceline.worker.errors import InternalError
from paceline.worker.spec.commit import CommitResult, commit_tokens
from paceline.worker.step import (
    Phase,
    ReqId,
    ReqStep,
    RowResult,
    StepReply,
)

# A waiting req that has been passed over for so long goes before those of higher priority.
MAX_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class NextStep:
    rows: list[StepRow]
    preempted: tuple[ReqId, ...]


class ReqTable:
    """All state of a group's reqs; every method leaves the page accounting exact."""

    def __init__(
        self,
        num_pages: int,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        *,
        is_speculating: bool,
    ) -> None:
        self._pages = ReqPages(
            num_pages, cache.page_size, enable_prefix_caching=cache.enable_prefix_caching
        )
        # A lone req must be able to reach this length, so the pool bounds it as well.
        self.max_model_len = min(max_model_len, num_pages * cache.page_size)
        # Every running req gets a token in every step.
        self.max_num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._is_speculating = is_speculating
        self._reqs: dict[ReqId, ReqState] = {}
        self._running: dict[ReqId, ReqState] = {}
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
        if req.output_ids:
            done = self._commit(req, req.output_ids[-1:], num_taken_back=1)
            if done.finish_reason is not None:
                return _last_event(req, (), done, now_s)
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
        """Takes a req out and its pages back; its computed prefix stays in the cache."""
        del self._reqs[req.req_id]
        if self._waiting.remove(req.req_id) is not None:
            self._order = None
            return
        self._stop_running(req, keep_prefix=keep_prefix)

    def end_all(self, *, keep_prefix: bool) -> list[ReqState]:
        reqs = list(self._reqs.values())
        for req in reqs:
            self.end(req, keep_prefix=keep_prefix)
        return reqs

    def plan(self, num_draft_tokens: int, *, is_chain: bool, now_unix_s: float) -> NextStep:
        """Decides a step and gives its rows their pages.

        Preempted reqs wait again with all their tokens.
        """
        step = plan_step(
            [self._view(req) for req in self._running.values()],
            self._admissible(now_unix_s),
            self._pages.num_available,
            PlanLimits(
                page_size=self._pages.page_size,
                max_num_reqs=self.max_num_reqs,
                max_num_batched_tokens=self._scheduler.max_num_batched_tokens,
                chunked_prefill_size=self._scheduler.chunked_prefill_size,
                max_num_tokens=self.max_model_len,
                num_draft_tokens=num_draft_tokens,
                is_chain=is_chain,
            ),
            self._pages.num_exclusive,
        )
        for req_id in step.preempted:
            self._preempt(self._running[req_id])
        # All prefixes are taken before any page is, lest one evicts what the next was promised.
        for admitted in step.admitted:
            self._admit(admitted)
        for admitted in step.admitted:
            self._pages.grow(admitted.req_id, admitted.num_tokens)
        return NextStep([self._take_row(row) for row in step.rows], step.preempted)

    def apply(self, step: BuiltStep, reply: StepReply, now_s: float) -> list[ReqEvent]:
        """Commits what came of a step; finished reqs are gone when it returns.

        A req whose row has an error ends with it, and the others do not notice. Behind guesses the
        row is first tried without any: a wrong guess may be what the model cannot compute.

        Raises InternalError: the reply does not answer the plan.
        """
        if reply.step_id != step.plan.step_id or len(reply.rows) != len(step.rows):
            raise InternalError(
                f"step {step.plan.step_id} of {len(step.rows)} rows was answered by step "
                f"{reply.step_id} of {len(reply.rows)} rows"
            )
        events: list[ReqEvent] = []
        for row, req_step, result in zip(step.rows, step.plan.rows, reply.rows, strict=True):
            row.req.num_written_pages = len(row.pages)
            if not row.is_decoding and not result.error:
                self._advance_prefill(row.req, len(req_step.input_ids))
            if req_step.num_logits == 0:
                continue
            if not result.new_ids and not result.error:
                raise InternalError(f"step {reply.step_id} chose no token for {row.req.req_id}")
            event = self._emit(row.req, req_step, result, now_s)
            if event.new_ids or event.is_last:
                events.append(event)
        return events

    def check(self) -> None:
        """Proves the invariants between steps: no page lost or shared wrongly, lengths agree."""
        self._pages.check()
        rows = [req.req_pool_index for req in self._running.values()]
        assert sorted(rows + self._free_rows) == list(range(1, self.max_num_reqs + 1))
        assert len(self._reqs) == len(self._running) + len(self._waiting)
        for req in self._running.values():
            num_owned = len(self._pages.pages_of(req.req_id)) * self._pages.page_size
            assert num_owned >= req.num_computed_tokens, f"req {req.req_id} lacks pages"
            if req.is_decoding:
                assert req.num_computed_tokens == req.num_tokens - 1, f"req {req.req_id} lags"

    def _wait(self, req: ReqState) -> None:
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
        if len(self._running) >= self.max_num_reqs or not self._waiting:
            return
        if self._order is None or now_unix_s - self._ordered_at_s > 1.0:
            self._order = sort_waiting(self._waiting, now_unix_s, max_wait_s=MAX_WAIT_S)
            self._ordered_at_s = now_unix_s
        for waiting in self._order:
            prefix = self._pages.match(self._reqs[waiting.req_id].all_ids())
            yield AdmissibleReq(
                waiting.req_id, waiting.num_prompt_tokens, prefix, self._pages.num_unused(prefix)
            )

    def _view(self, req: ReqState) -> RunningReq:
        return RunningReq(
            req_id=req.req_id,
            priority=req.priority,
            order=req.order,
            num_tokens=req.num_tokens,
            num_computed_tokens=req.num_computed_tokens,
            num_pages=len(self._pages.pages_of(req.req_id)),
            num_tokens_left=1 if req.is_suspect else self._num_tokens_left(req),
            is_decoding=req.is_decoding,
        )

    def _num_tokens_left(self, req: ReqState) -> int:
        by_limit = req.params.max_tokens - len(req.output_ids)
        return min(by_limit, self.max_model_len - req.num_tokens)

    def _admit(self, admitted: AdmissibleReq) -> None:
        req = self._reqs[admitted.req_id]
        self._waiting.remove(req.req_id)
        self._order = None
        self._pages.open(req.req_id, admitted.prefix)
        self._num_admitted += 1
        if req.order == 0:  # a preempted req keeps its age, so it is not the youngest for ever
            req.order = self._num_admitted
            num_cached = len(admitted.prefix) * self._pages.page_size
            req.cached_tokens = min(num_cached, len(req.prompt_ids))
        req.req_pool_index = heapq.heappop(self._free_rows)
        req.prefill_len = req.num_tokens
        req.num_computed_tokens = len(admitted.prefix) * self._pages.page_size
        req.num_written_pages = 0
        req.accept_length = 0
        req.is_suspect = False
        self._running[req.req_id] = req

    def _preempt(self, req: ReqState) -> None:
        self._stop_running(req, keep_prefix=True)
        req.num_preemptions += 1
        self._wait(req)

    def _stop_running(self, req: ReqState, *, keep_prefix: bool) -> None:
        if keep_prefix:
            self._pages.close(req.req_id, req.all_ids(), req.num_computed_tokens)
        else:
            self._pages.close(req.req_id)
        del self._running[req.req_id]
        heapq.heappush(self._free_rows, req.req_pool_index)
        req.req_pool_index = 0
        req.num_computed_tokens = 0

    def _take_row(self, row: PlannedRow) -> StepRow:
        req = self._running[row.req_id]
        self._pages.grow(row.req_id, req.num_computed_tokens + row.num_tokens)
        return StepRow(req, self._pages.pages_of(row.req_id), row.num_tokens, row.is_decoding)

    def _advance_prefill(self, req: ReqState, num_tokens: int) -> None:
        req.num_computed_tokens += num_tokens
        if req.num_computed_tokens == req.prefill_len:
            first_changed = self._pages.keep_prefix(
                req.req_id, req.all_ids(), req.num_computed_tokens
            )
            req.num_written_pages = min(req.num_written_pages, first_changed)

    def _emit(self, req: ReqState, step: ReqStep, result: RowResult, now_s: float) -> ReqEvent:
        num_left = self._num_tokens_left(req)
        done = self._commit(req, result.new_ids)
        req.output_ids.extend(done.emitted)
        req.num_computed_tokens = req.num_tokens - 1
        if done.emitted:
            req.num_steps += 1
            if req.first_token_s is None:
                req.first_token_s = now_s
        if step.phase is Phase.VERIFY:
            req.proposed_tokens += len(step.input_ids) - 1
            req.accepted_tokens += done.accept_length
            req.accept_length = result.accept_length
        elif step.phase is Phase.DECODE:
            req.accept_length = 0
            if self._is_speculating and num_left > 1:
                req.fallback_steps += 1
        if done.finish_reason is not None:  # as without a draft, whatever lies behind it
            self.end(req)
            return _last_event(req, done.emitted, done, now_s)
        req.is_suspect = bool(result.error)
        if result.error and step.phase is not Phase.VERIFY:
            self.end(req, keep_prefix=False)
            error = InternalError(
                f"request '{req.req_id}' ended after {len(req.output_ids)} tokens: {result.error}"
            )
            return ReqEvent(req.req_id, done.emitted, receipt=req.receipt(now_s), error=error)
        return ReqEvent(req.req_id, done.emitted)

    def _commit(
        self, req: ReqState, new_ids: Sequence[int], *, num_taken_back: int = 0
    ) -> CommitResult:
        """Judges `new_ids` behind the req's tokens without the last `num_taken_back`."""
        return commit_tokens(
            new_ids,
            num_output_before=len(req.output_ids) - num_taken_back,
            num_total_before=req.num_tokens - num_taken_back,
            params=req.params,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.max_model_len,
        )


def _last_event(
    req: ReqState, new_ids: tuple[int, ...], done: CommitResult, now_s: float
) -> ReqEvent:
    return ReqEvent(
        req.req_id, new_ids, done.finish_reason, done.matched_token_id, req.receipt(now_s)
    )
