"""The device thread's order of business, with the real req table and no model."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from paceline.worker.draft.device_loop import ClosedReqs, DeviceLoop
from paceline.worker.draft.proposer import Proposer, Round, TreeShape, build_proposer
from paceline.worker.link.base import Commit, CommitRow, Proposals, SyncRow
from paceline.worker.step import Epoch, ReqId
from tests.spec_harness import worker_config

SHAPE = TreeShape(4, 1)


def commit(number: int, req_id: str) -> Commit:
    sync = SyncRow(ReqId(req_id), (1, 2, 3), 1, 0.0, 0, 1.0, 0.0)
    return Commit(Epoch(1), number, (sync,), (CommitRow(ReqId(req_id), 3, (), 0, 5),))


class Gate:
    """Holds the device thread inside an answer until opened, so that work piles up behind it."""

    def __init__(self, proposer: Proposer) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()
        self._answer: Callable[[Sequence[Round]], list[Proposals]] = proposer.answer
        proposer.answer = self._wait  # type: ignore[method-assign]  # a gate

    def _wait(self, rounds: Sequence[Round]) -> list[Proposals]:
        self.entered.set()
        assert self._opened.wait(10)
        return self._answer(rounds)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def proposer(tiny_draft: Path) -> Proposer:
    return build_proposer(worker_config(tiny_draft))


def test_of_rounds_that_piled_up_all_are_taken_and_the_last_is_answered(proposer: Proposer) -> None:
    gate, answers, done = Gate(proposer), [], threading.Event()
    failures: list[BaseException] = []
    loop = DeviceLoop(proposer, on_failure=failures.append)

    def deliver(proposals: Proposals) -> None:
        answers.append(proposals.round)
        if proposals.round == 4:
            done.set()

    loop.open("t", SHAPE, deliver, lambda: None)
    loop.start()
    assert loop.submit("t", commit(1, "a"))
    assert gate.entered.wait(10)
    for number, req_id in ((2, "b"), (3, "c"), (4, "d")):
        assert loop.submit("t", commit(number, req_id))
    gate.open()
    assert done.wait(10)
    assert answers == [1, 4]
    assert set(loop.snapshot().req_ids) == {"a", "b", "c", "d"}
    assert loop.stop(10)
    assert failures == []


def test_a_req_closed_behind_its_round_does_not_come_back(proposer: Proposer) -> None:
    gate, answers, done = Gate(proposer), [], threading.Event()

    def deliver(proposals: Proposals) -> None:
        answers.append(proposals)
        if proposals.round == 2:
            done.set()

    loop = DeviceLoop(proposer, on_failure=lambda error: None)
    loop.open("t", SHAPE, deliver, lambda: None)
    loop.start()
    loop.submit("t", commit(1, "a"))
    assert gate.entered.wait(10)
    loop.submit("t", commit(2, "b"))
    loop.submit("t", ClosedReqs((ReqId("a"), ReqId("b"))))
    gate.open()
    assert done.wait(10)
    assert answers[-1].rows == ()
    assert loop.snapshot().req_ids == ()
    assert loop.stop(10)


def test_a_target_that_floods_is_told_to_wait_and_when_to_go_on(proposer: Proposer) -> None:
    gate, room = Gate(proposer), threading.Event()
    loop = DeviceLoop(proposer, on_failure=lambda error: None)
    loop.open("t", SHAPE, lambda proposals: None, room.set)
    loop.start()
    loop.submit("t", commit(1, "a"))
    assert gate.entered.wait(10)
    num_taken = 0
    while loop.submit("t", ClosedReqs(())):
        num_taken += 1
        assert num_taken < 1_000
    gate.open()
    assert room.wait(10)
    assert loop.submit("t", ClosedReqs(()))
    assert loop.stop(10)


def test_a_device_that_fails_says_so_once_and_ends(proposer: Proposer) -> None:
    def fail(rounds: Sequence[Round]) -> list[Proposals]:
        raise AssertionError("a bug")

    proposer.answer = fail  # type: ignore[method-assign]  # a faulty device
    failures: list[BaseException] = []
    failed = threading.Event()

    def on_failure(error: BaseException) -> None:
        failures.append(error)
        failed.set()

    loop = DeviceLoop(proposer, on_failure=on_failure)
    loop.open("t", SHAPE, lambda proposals: None, lambda: None)
    loop.start()
    loop.submit("t", commit(1, "a"))
    assert failed.wait(10)
    assert loop.submit("t", commit(2, "a"))
    assert loop.stop(10)
    assert [str(error) for error in failures] == ["a bug"]
