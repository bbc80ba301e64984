"""DeviceLoop: the one thread that owns a draft's device, and the rounds that wait for it.

It knows targets by name and no transport. What waits for the device is bounded. Of a target's
rounds all are taken, in order, and only the last is answered: latest wins.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from paceline.worker.draft.proposer import Proposer, ProposerSnapshot, Round, TreeShape
from paceline.worker.link.base import Commit, Proposals
from paceline.worker.step import ReqId

log = logging.getLogger(__name__)

# A lockstep target has one round open, and one more after each that it gave up waiting for.
_MAX_WAITING_ITEMS = 64


@dataclass(frozen=True, slots=True)
class ClosedReqs:
    req_ids: tuple[ReqId, ...]


@dataclass(slots=True)
class _Target:
    shape: TreeShape
    deliver: Callable[[Proposals], None]
    make_room: Callable[[], None]
    waiting: list[Commit | ClosedReqs] = field(default_factory=list)
    was_refused: bool = False
    is_gone: bool = False


class DeviceLoop:
    """Runs a proposer for several targets. `start`, then any thread may call the rest."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        on_failure: Callable[[BaseException], None],
        heartbeat_s: float = 1.0,
        device_thread: Executor | None = None,
    ) -> None:
        """`on_failure` is called once, on the device thread, when the device is lost. An idle loop
        sends the group's followers a sign of life every `heartbeat_s`. `device_thread` is the one
        thread that built the proposer; without it the loop has one of its own."""
        self._proposer = proposer
        self._on_failure = on_failure
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._targets: dict[str, _Target] = {}
        self._is_stopping = False
        self._snapshot = proposer.snapshot()
        self._device_thread = device_thread or ThreadPoolExecutor(1, "draft-device")
        self._running: Future[None] | None = None

    def start(self) -> None:
        self._running = self._device_thread.submit(self._run)

    def open(
        self,
        target: str,
        shape: TreeShape,
        deliver: Callable[[Proposals], None],
        make_room: Callable[[], None],
    ) -> None:
        """Both functions are called on the device thread and must not block; `make_room` when a
        `submit` was refused and the next may succeed."""
        with self._changed:
            assert target not in self._targets
            self._targets[target] = _Target(shape, deliver, make_room)

    def submit(self, target: str, item: Commit | ClosedReqs) -> bool:
        """False when too much waits already. A target that has ended is ignored."""
        with self._changed:
            state = self._targets.get(target)
            if state is None or state.is_gone:
                return True
            if len(state.waiting) >= _MAX_WAITING_ITEMS:
                state.was_refused = True
                return False
            state.waiting.append(item)
            self._changed.notify()
            return True

    def end(self, target: str) -> None:
        """Frees all that the target's reqs hold."""
        with self._changed:
            if state := self._targets.get(target):
                state.is_gone = True
                self._changed.notify()

    def snapshot(self) -> ProposerSnapshot:
        """As of the end of the last round; never waits for the device."""
        return self._snapshot

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the round it is in. Returns whether it ended in time."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        return self._running is None or bool(wait([self._running], timeout_s).done)

    # ---- the device thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # the thread's boundary: whoever waits for it must be told
            log.exception("draft device failed")
            self._on_failure(error)
        finally:
            self._proposer.shutdown()

    def _turn(self) -> bool:
        """One round for every target that waits, or none when idle. False when stopping."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self._has_work(), self._heartbeat_s)
            if self._is_stopping:
                return False
            gone = [name for name, state in self._targets.items() if state.is_gone]
            for name in gone:
                del self._targets[name]
            work = [
                (name, state, list(state.waiting))
                for name, state in self._targets.items()
                if state.waiting
            ]
            refused = [state for state in self._targets.values() if state.was_refused]
            for state in self._targets.values():
                state.waiting.clear()
                state.was_refused = False
        self._proposer.heartbeat()
        for state in refused:
            state.make_room()
        for name in gone:
            self._proposer.close_target(name)
        self._answer(work)
        return True

    def _has_work(self) -> bool:
        return any(state.waiting or state.is_gone for state in self._targets.values())

    def _answer(self, work: list[tuple[str, _Target, list[Commit | ClosedReqs]]]) -> None:
        rounds: list[Round] = []
        delivers: list[Callable[[Proposals], None]] = []
        for name, state, items in work:
            latest: Round | None = None
            for item in items:
                if isinstance(item, ClosedReqs):
                    self._proposer.close_reqs(name, item.req_ids)
                else:
                    latest = self._proposer.take(name, item, state.shape)
            if latest is not None:
                rounds.append(latest)
                delivers.append(state.deliver)
        answers = self._proposer.answer(rounds)
        self._snapshot = self._proposer.snapshot()
        for deliver, proposals in zip(delivers, answers, strict=True):
            deliver(proposals)
