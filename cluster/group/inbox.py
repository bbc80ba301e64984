"""Inbox: what other threads leave for the step thread, and the sinks it answers to."""

import logging
import threading
from collections.abc import Callable, Sequence

from paceline.cluster.group.req_state import ReqEvent, ReqState
from paceline.cluster.scheduling.admission import AdmissionLimits, admit
from paceline.worker.clock import Clock
from paceline.worker.errors import AlreadyExists, Unavailable
from paceline.worker.step import ReqId

log = logging.getLogger(__name__)

Wake = Callable[[], None]
# Takes an event; what it answers is called once, when every sink has its events of this step.
Sink = Callable[[ReqEvent], Wake | None]


class Inbox:
    """Every req from its submit to its last event, and the submits and aborts not yet taken.

    Bounded: what waits, here or in the group, counts against `limits`.
    """

    def __init__(self, limits: AdmissionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()  # guards all below
        self._sinks: dict[ReqId, Sink] = {}
        self._submitted: list[ReqState] = []
        self._num_submitted_tokens = 0
        self._aborted: list[ReqId] = []
        self._refusal = ""
        self._is_woken = False

    @property
    def is_empty(self) -> bool:
        return not self._sinks

    @property
    def is_closed(self) -> bool:
        return bool(self._refusal)

    def req_ids(self) -> tuple[ReqId, ...]:
        with self._changed:
            return tuple(self._sinks)

    def submitted_ids(self) -> tuple[ReqId, ...]:
        with self._changed:
            return tuple(req.req_id for req in self._submitted)

    @property
    def num_submitted_tokens(self) -> int:
        return self._num_submitted_tokens

    def submit(
        self,
        req: ReqState,
        sink: Sink,
        *,
        num_running: int,
        max_num_running: int,
        num_waiting_tokens: int,
    ) -> None:
        """Raises AlreadyExists, Overloaded, or Unavailable once closed.

        Args:
            num_running: reqs that run now, of `max_num_running` that may.
            num_waiting_tokens: prompt tokens of the reqs that wait in the group already.
        """
        with self._changed:
            if self._refusal:
                raise Unavailable(f"{self._refusal}; retry, another group will serve it")
            if req.req_id in self._sinks:
                raise AlreadyExists(f"request '{req.req_id}' is waiting or running here already")
            admit(
                req.num_tokens,
                num_waiting_reqs=max(len(self._sinks) - num_running, 0),
                num_waiting_prompt_tokens=num_waiting_tokens + self._num_submitted_tokens,
                has_room=len(self._sinks) < max_num_running,
                limits=self._limits,
            ).raise_if_refused()
            self._sinks[req.req_id] = sink
            self._submitted.append(req)
            self._num_submitted_tokens += req.num_tokens
            self._changed.notify_all()

    def abort(self, req_id: ReqId) -> bool:
        """False when there is no such req."""
        with self._changed:
            if req_id not in self._sinks:
                return False
            self._aborted.append(req_id)
            self._changed.notify_all()
            return True

    def abort_all(self) -> int:
        with self._changed:
            self._aborted += self._sinks
            self._changed.notify_all()
            return len(self._sinks)

    def close(self, refusal: str) -> None:
        """Refuses new reqs from now on, with the latest reason given."""
        with self._changed:
            self._refusal = refusal
            self._changed.notify_all()

    def wake(self) -> None:
        """Ends the next `wait_for_work`, or the present one."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def take(self) -> tuple[list[ReqState], list[ReqId]]:
        """Submitted reqs and ids to abort, in order and each once."""
        with self._changed:
            submitted, self._submitted = self._submitted, []
            self._num_submitted_tokens = 0
            aborted, self._aborted = self._aborted, []
        return submitted, list(dict.fromkeys(aborted))

    def send(self, events: Sequence[ReqEvent]) -> None:
        """Hands events to their sinks; a req is forgotten before its last event goes out."""
        if not events:
            return
        with self._changed:
            sinks = [self._sink_of(event) for event in events]
        wakes: dict[Wake, None] = {}
        for sink, event in zip(sinks, events, strict=True):
            if sink is None:
                continue  # its last event is out: stop and a failure may end a req together
            try:
                wake = sink(event)
            except Exception:  # one broken listener must not end the others
                log.exception("sink failed req_id=%s", event.req_id)
                self.abort(event.req_id)
                continue
            if wake is not None:
                wakes[wake] = None
        for wake in wakes:
            try:
                wake()
            except Exception:  # as above; it listens no more, so nobody is there to be told
                log.exception("listener not woken")
        with self._changed:
            if not self._sinks:
                self._changed.notify_all()

    def wait_for_work(self, timeout_s: float) -> bool:
        """Waits for a submit, an abort or `wake`; False when none came in time."""
        with self._changed:
            has_work = self._changed.wait_for(self._has_work, timeout_s)
            self._is_woken = False
            return has_work

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until every req has ended; False at the limit."""
        deadline_s = self._clock.monotonic() + timeout_s
        with self._changed:
            while self._sinks:
                left_s = deadline_s - self._clock.monotonic()
                if left_s <= 0:
                    return False
                # In slices, because the clock need not be the one that `wait` goes by.
                self._changed.wait(min(left_s, 0.1))
        return True

    def _sink_of(self, event: ReqEvent) -> Sink | None:
        sink = self._sinks.get(event.req_id)
        if event.is_last:
            self._forget(event.req_id)
        return sink

    def _forget(self, req_id: ReqId) -> None:
        self._sinks.pop(req_id, None)
        if req_id in self._aborted:  # too late, and not meant for the next req of this id
            self._aborted = [other for other in self._aborted if other != req_id]

    def _has_work(self) -> bool:
        return bool(self._submitted or self._aborted) or self._is_woken
