"""StepLoop: plan -> propose -> launch -> collect -> apply for one group, in its leader's process.

Any thread may submit and abort; one thread, the step thread, owns the reqs, the executor and the
drafter. The loop knows no gRPC and no Ray; `ReqTable` decides, this file only drives.

How much overlaps, if the executor can overlap steps at all:

- With a draft on the same ranks, the next step is launched before the last one is collected; what a
  step brings is known one step later. When there is nothing to launch, it is collected at once.
- With a drafter on the host, which needs the last tokens to guess the next, only the sending of
  events overlaps: collect and commit, propose and launch, then send.
"""

import logging
import threading

from paceline.cluster.group.drafting import DrafterSlot
from paceline.cluster.group.inbox import Inbox, Sink
from paceline.cluster.group.pipeline import StepExecutor, StepPipeline
from paceline.cluster.group.req_state import (
    LoopSnapshot,
    NewReq,
    ReqEvent,
    ReqReceipt,
    ReqState,
)
from paceline.cluster.group.req_table import NextStep, ReqTable
from paceline.cluster.group.step_rows import build_step
from paceline.cluster.scheduling.admission import AdmissionLimits
from paceline.cluster.scheduling.dispatch import GroupLoad
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.config import CacheConfig, SchedulerConfig, SpecConfig
from paceline.worker.errors import (
    DeadlineExceeded,
    InternalError,
    PacelineError,
    Unavailable,
)
from paceline.worker.spec.adapt import DepthController
from paceline.worker.spec.drafter import Drafter
from paceline.worker.spec.limits import reserve_len
from paceline.worker.step import FinishReason, ReqId

__all__ = ["LoopSnapshot", "NewReq", "ReqEvent", "ReqReceipt", "Sink", "StepExecutor", "StepLoop"]

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
ABORT_GRACE_S = 10.0  # how long drain waits for the reqs it aborted


class StepLoop:
    """The reqs of one group, from submit to their last event.

    Args:
        executor: used on the step thread only; its owner shuts it down once `run` has returned.
        drafter: the loop owns it and shuts it down when it is replaced or the loop ends. Never
            asked where the ranks themselves draft, as `spec` says.
        vocab_size: bounds the ids of prompts and drafts; 0 leaves them unchecked.
        check_invariants: proves the page accounting after every step, for tests.

    Raises ConfigError: the pool is too small for one req and its drafts.
    """

    def __init__(
        self,
        executor: StepExecutor,
        drafter: Drafter | None,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        spec: SpecConfig,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        clock: Clock | None = None,
        limits: AdmissionLimits | None = None,
        vocab_size: int = 0,
        group_id: str = "",
        check_invariants: bool = False,
    ) -> None:
        self._executor = executor
        self._spec = spec
        self._clock = clock or SystemClock()
        self._vocab_size = vocab_size
        self._group_id = group_id
        self._check_invariants = check_invariants
        self._drafting = DrafterSlot(drafter, vocab_size=vocab_size)
        self._inbox = Inbox(limits or AdmissionLimits(), self._clock)
        self._pipeline = StepPipeline(executor, self._clock)
        self._depth = DepthController(spec) if spec.is_colocated else None
        # The next step may be planned before the last one is collected.
        self._runs_ahead = executor.is_overlapped and spec.is_colocated
        self._table = ReqTable(
            executor.num_pages,
            cache,
            scheduler,
            max_model_len,
            eos_token_ids,
            is_speculating=spec.method != "none",
            reserve=reserve_len(spec, self._runs_ahead),
            key_shift=int(spec.is_colocated and spec.method != "standalone"),
        )
        # Held while planning and applying, never while drafting or computing.
        self._table_lock = threading.Lock()
        self._step_id = 0
        self._held: list[ReqEvent] = []  # to be sent in this step
        self._error: PacelineError | None = None
        self._is_running = False
        self._is_stopping = False

    @property
    def healthy(self) -> bool:
        """False once a step has failed; the loop computes nothing more then."""
        return self._error is None

    @property
    def step_id(self) -> int:
        """Steps begun since the start; moves unless the loop is idle."""
        return self._step_id

    @property
    def is_idle(self) -> bool:
        """Whether no req waits or runs."""
        return self._inbox.is_empty

    @property
    def max_model_len(self) -> int:
        """Tokens a req may have, prompt and output together: the model's limit or the pool's."""
        return self._table.max_model_len

    def submit(self, req: NewReq, sink: Sink) -> None:
        """Takes a req; `sink` gets its events on the step thread and must not block or raise.

        Raises:
            InvalidRequest: it could never run here.
            AlreadyExists: a req of this id has not ended yet.
            Overloaded: too much waits already.
            Unavailable: the loop drains, stops or has failed.
        """
        req.check(self.max_model_len, self._vocab_size)
        self._inbox.submit(
            ReqState(req, self._clock.monotonic(), self._clock.unix_s()),
            sink,
            num_running=self._table.num_running,
            max_num_running=self._table.max_num_reqs,
            num_waiting_tokens=self._table.num_waiting_prompt_tokens,
        )

    def abort(self, req_id: ReqId) -> bool:
        """Ends a req within one step; False when there is none. Its last event says ABORT."""
        return self._inbox.abort(req_id)

    def set_drafter(self, drafter: Drafter | None, *, epoch: int = 0) -> None:
        """Replaces the drafter before the next step; the old one is shut down, on another thread.

        Reqs go on without a break: what a draft knows of them is no part of their state.
        """
        self._drafting.replace(drafter, epoch)
        self._inbox.wake()

    def load(self) -> GroupLoad:
        """What dispatch wants to know; for any thread."""
        with self._table_lock:
            num_free_pages = self._table.num_available_pages
            num_running = self._table.num_running
            num_pending = self._table.num_pending_prefill_tokens
        req_ids = self._inbox.req_ids()
        return GroupLoad(
            group_id=self._group_id,
            page_size=self._table.page_size,
            num_pages=self._table.num_pages,
            num_free_pages=num_free_pages,
            num_running_reqs=num_running,
            num_waiting_reqs=max(len(req_ids) - num_running, 0),
            max_num_reqs=self._table.max_num_reqs,
            num_pending_prefill_tokens=num_pending + self._inbox.num_submitted_tokens,
            draining=self._inbox.is_closed,
            step_id=self._step_id,
            epoch=self._drafting.epoch,
            req_ids=req_ids,
            draft=self._drafting.health(),
        )

    def snapshot(self) -> LoopSnapshot:
        """What operators want to know; for any thread."""
        with self._table_lock:
            counts = self._table.page_counts
            running_ids = self._table.running_ids()
            waiting_ids = self._table.waiting_ids()
        return LoopSnapshot(
            num_pages=counts.num_pages,
            num_free_pages=counts.num_free,
            num_cached_pages=counts.num_cached,
            num_orphaned_pages=counts.num_orphaned,
            running_req_ids=running_ids,
            waiting_req_ids=waiting_ids + self._inbox.submitted_ids(),
            step_id=self._step_id,
            epoch=self._drafting.epoch,
            draft_attached=self._drafting.is_attached,
            draft=self._drafting.health(),
        )

    def drain(self, timeout_s: float) -> int:
        """Refuses new reqs and waits for those here; aborts what is left at the limit.

        Returns: how many were aborted. Not for the step thread.
        """
        self._inbox.close("the group is draining")
        if self._inbox.wait_until_empty(timeout_s):
            return 0
        num_aborted = self._inbox.abort_all()
        if self._is_running:
            self._inbox.wait_until_empty(ABORT_GRACE_S)
        return num_aborted

    def run(self) -> None:
        """Steps until `stop` is called or a step fails; every req has had its last event then."""
        self._is_running = True
        try:
            while self._error is None and not self._is_stopping:
                if not self.step_once() and not self._inbox.wait_for_work(HEARTBEAT_S):
                    self._executor.heartbeat()
        except Exception as error:
            log.exception("step loop failed step_id=%d", self._step_id)
            self._fail(error)
        finally:
            self._is_running = False
            self._close()

    def stop(self) -> None:
        """Makes `run` return after the current step; reqs that are left end as Unavailable."""
        self._is_stopping = True
        self._inbox.close("the group is stopping")
        self._inbox.wake()
        if not self._is_running:
            self._close()

    def step_once(self) -> bool:
        """Does one step; False when there was nothing to do. For `run` and for tests."""
        if self._error is not None:
            return False
        self._drafting.swap()
        had_step = len(self._pipeline) > 0
        if not self._runs_ahead:
            self._collect()
        step = self._next_step()
        if step.must_wait:
            self._collect()
            step = self._next_step()
        did_something = bool(had_step or step.rows or step.preempted or self._held)
        if not self._executor.is_overlapped:
            self._send_held()
        if step.rows:
            self._launch(step)
        self._send_held()
        # A step in flight is left there only while another one, or the sending, overlaps with it.
        num_left = int(self._executor.is_overlapped and bool(step.rows))
        while len(self._pipeline) > num_left:
            self._collect()
            self._send_held()
        if self._check_invariants:
            with self._table_lock:
                self._table.check()
        return did_something

    def _next_step(self) -> NextStep:
        """Takes in what other threads left, and plans."""
        num_draft_tokens = self._spec.num_draft_tokens if self._drafting.is_attached else 1
        with self._table_lock:
            ended = self._take_inbox() + self._expire()
            step = self._table.plan(
                num_draft_tokens,
                is_chain=self._spec.topk == 1,
                now_unix_s=self._clock.unix_s(),
                choose_shape=None if self._depth is None else self._depth.choose,
            )
        self._drafting.forget([*(event.req_id for event in ended), *step.preempted])
        self._held += ended
        return step

    def _launch(self, next_step: NextStep) -> None:
        rows = next_step.rows
        trees = {} if self._spec.is_colocated else self._drafting.propose(rows)
        self._step_id += 1
        step = build_step(self._step_id, rows, trees, next_step.shape, runs_ahead=self._runs_ahead)
        with self._table_lock:
            self._table.launch(step)
        try:
            self._pipeline.launch(step)
        except Exception as error:  # whatever a device or a peer rank raises ends this group alone
            log.exception("step failed step_id=%d num_rows=%d", self._step_id, len(rows))
            self._fail(error)

    def _collect(self) -> None:
        """Commits what came of the oldest step in flight, if there is one."""
        if not len(self._pipeline):
            return
        try:
            done = self._pipeline.collect()
            with self._table_lock:
                events = self._table.apply(done.step, done.reply, self._clock.monotonic())
        except Exception as error:  # as above
            log.exception("step failed step_id=%d", self._step_id)
            self._fail(error)
            return
        for event in events:
            if event.error is not None:
                log.error("req failed step_id=%d: %s", done.reply.step_id, event.error)
        self._drafting.forget([event.req_id for event in events if event.is_last])
        self._held += events
        if self._depth is not None:
            done.teach(self._depth)

    def _send_held(self) -> None:
        held, self._held = self._held, []
        self._inbox.send(held)

    def _take_inbox(self) -> list[ReqEvent]:
        """Lets submitted reqs wait and ends aborted ones."""
        submitted, aborted = self._inbox.take()
        now_s = self._clock.monotonic()
        added = [self._table.add(req, now_s) for req in submitted]
        events = [event for event in added if event is not None]
        for req_id in aborted:
            req = self._table.get(req_id)
            if req is not None:
                self._table.end(req)
                receipt = req.receipt(now_s)
                events.append(ReqEvent(req_id, finish_reason=FinishReason.ABORT, receipt=receipt))
        return events

    def _expire(self) -> list[ReqEvent]:
        events = []
        for req in self._table.expired(self._clock.unix_s()):
            phase = req.phase_name
            self._table.end(req)
            error = DeadlineExceeded(
                f"request '{req.req_id}' ran out of time in phase '{phase}' with "
                f"{len(req.output_ids)} tokens; give it a later deadline",
                phase,
            )
            receipt = req.receipt(self._clock.monotonic())
            events.append(ReqEvent(req.req_id, receipt=receipt, error=error))
        return events

    def _fail(self, error: Exception) -> None:
        """Ends every req: the KV of a step that broke off is worth nothing."""
        if not isinstance(error, PacelineError):
            name = type(error).__name__
            error = InternalError(f"step {self._step_id} failed: {name}: {error}")
        self._error = error
        self._pipeline.clear()
        self._inbox.close(f"the group has failed: {error}")
        self._end_all(error, keep_prefix=False)

    def _close(self) -> None:
        self._inbox.close("the group has stopped")
        while self._error is None and len(self._pipeline) > 0:
            self._collect()
        stopped = Unavailable("the group has stopped; retry, another one will serve it")
        self._end_all(stopped, keep_prefix=self._error is None)
        self._drafting.close()

    def _end_all(self, error: PacelineError, *, keep_prefix: bool) -> None:
        """Ends all reqs; those that have not begun lost nothing and may begin elsewhere."""
        self._send_held()
        not_begun = Unavailable("the group stopped before the request began; retry")
        submitted, _ = self._inbox.take()
        begun_ids: frozenset[ReqId] = frozenset()
        reqs = submitted
        try:
            with self._table_lock:
                begun_ids = frozenset(self._table.running_ids())
                reqs = submitted + self._table.end_all(keep_prefix=keep_prefix)
        except Exception:  # a broken table must not keep the clients waiting
            log.exception("page accounting failed step_id=%d", self._step_id)
        now_s = self._clock.monotonic()
        receipts = {req.req_id: req.receipt(now_s) for req in reqs}
        events = [
            ReqEvent(
                req_id,
                receipt=receipts.get(req_id),
                error=error if req_id in begun_ids else not_begun,
            )
            for req_id in self._inbox.req_ids()
        ]
        self._drafting.forget([event.req_id for event in events])
        self._inbox.send(events)
