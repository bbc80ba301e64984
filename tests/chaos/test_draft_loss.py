"""A draft that dies, hangs or garbles costs speed only: the same tokens, every page returned."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.worker.draft.proposer import Proposer, build_proposer
from paceline.worker.link.grpc_link import GrpcLink
from paceline.worker.link.local_link import LocalLink
from paceline.worker.spec.breaker import CircuitBreaker
from paceline.worker.spec.drafter import DraftContext
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.tree import DraftTree
from paceline.worker.spec.vocab import vocab_hash
from paceline.worker.step import SamplingParams
from paceline.worker.target.build import build_executor
from tests import draft_host
from tests.draft_host import SPEC, draft_config
from tests.faults import Faults, FaultyLink
from tests.loop_group import GREEDY as LOOP_GREEDY
from tests.loop_group import PROMPTS as LOOP_PROMPTS
from tests.loop_group import SAMPLED as LOOP_SAMPLED
from tests.loop_group import LoopGroup
from tests.spec_harness import GREEDY, SAMPLED, SoloTarget, worker_config
from tests.tiny import VOCAB_SIZE

PROMPTS = [[1, 5, 9, 44, 60, 100, 7], [1, *range(20, 50)], [3]]


class DraftProcess:
    """A draft server of its own process, always on the same port."""

    def __init__(self, model: Path) -> None:
        self._model = model
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, draft_host.__file__, str(self._model), str(self.port)],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        assert ready, "the draft process did not start in time"
        assert int(self._process.stdout.readline()) == self.port

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=10)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def draft_process(tiny_model: Path) -> Iterator[DraftProcess]:
    process = DraftProcess(tiny_model)
    yield process
    process.kill()


class Watched(LinkDrafter):
    """Calls `before_round(number)` before each proposal and keeps how long each took."""

    before_round: Callable[[int], None]

    def watch(self, before_round: Callable[[int], None]) -> None:
        self.before_round = before_round
        self.durations_s: list[float] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        self.before_round(len(self.durations_s))
        started_s = time.monotonic()
        trees = super().propose(contexts)
        self.durations_s.append(time.monotonic() - started_s)
        return trees


def make_link(process: DraftProcess, model: Path) -> GrpcLink:
    return GrpcLink(
        f"127.0.0.1:{process.port}",
        target_group_id="target-0",
        vocab_hash=vocab_hash(model),
        vocab_size=VOCAB_SIZE,
        spec=SPEC,
        max_backoff_s=0.1,
    )


def test_a_killed_draft_costs_no_token_and_is_used_again_after_a_restart(
    draft_process: DraftProcess, tiny_model: Path
) -> None:
    target = SoloTarget(worker_config(tiny_model, spec=SPEC, num_pages=256))
    plain = target.run(PROMPTS, SAMPLED)
    link = make_link(draft_process, tiny_model)
    assert link.wait_until_up(20)
    first_epoch = link.epoch
    drafter = Watched(link, SPEC, vocab_size=VOCAB_SIZE)
    drafter.watch(lambda number: draft_process.kill() if number == 4 else None)
    got = target.run(PROMPTS, SAMPLED, drafter)
    assert [req.output_ids for req in got] == [req.output_ids for req in plain]
    assert 0 < drafter.counters().num_draft_rows <= 4 * len(PROMPTS)
    assert max(drafter.durations_s) < SPEC.draft_timeout_s
    assert not link.is_up

    draft_process.start()
    deadline_s = time.monotonic() + 20
    while not link.is_up:
        assert time.monotonic() < deadline_s
        link.wait_until_up(0.1)
    assert link.epoch > first_epoch
    num_before = drafter.counters().num_draft_rows
    drafter.watch(lambda number: None)
    again = target.run(PROMPTS, SAMPLED, drafter)
    assert [req.output_ids for req in again] == [req.output_ids for req in plain]
    assert drafter.counters().num_draft_rows > num_before + 12
    started_s = time.monotonic()
    drafter.shutdown()
    assert time.monotonic() - started_s < 3
    target.shutdown()


@pytest.mark.parametrize("params", [LOOP_GREEDY, LOOP_SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_killed_mid_stream_costs_a_batch_no_token_and_no_page(
    draft_process: DraftProcess, tiny_model: Path, params: SamplingParams
) -> None:
    config = worker_config(tiny_model, spec=SPEC, num_pages=256, chunked_prefill_size=8)
    executor = build_executor(config)
    plain = LoopGroup(executor)
    expected = plain.generate(LOOP_PROMPTS, params)
    plain.close()
    link = make_link(draft_process, tiny_model)
    assert link.wait_until_up(20)
    drafter = Watched(link, SPEC, vocab_size=VOCAB_SIZE)
    group = LoopGroup(executor, drafter)
    num_running: list[int] = []

    def kill(number: int) -> None:
        if number == 3:
            num_running.append(len(group.loop.snapshot().running_req_ids))
            draft_process.kill()

    drafter.watch(kill)
    assert group.generate(LOOP_PROMPTS, params) == expected
    assert num_running == [len(LOOP_PROMPTS)], "killed in the middle"
    assert not link.is_up
    assert group.total("accepted_tokens") > 0
    assert group.total("fallback_steps") >= len(LOOP_PROMPTS)
    group.close()
    drafter.shutdown()
    executor.shutdown()


def test_a_draft_that_hangs_is_waited_for_within_the_timeout_and_then_left_alone(
    draft_process: DraftProcess, tiny_model: Path
) -> None:
    spec = replace(SPEC, draft_timeout_s=0.2)
    target = SoloTarget(worker_config(tiny_model, spec=spec, num_pages=256))
    plain = target.run(PROMPTS, GREEDY)
    link = make_link(draft_process, tiny_model)
    assert link.wait_until_up(20)
    drafter = Watched(
        link, spec, breaker=CircuitBreaker(max_failures=2, first_pause_s=60, max_pause_s=60)
    )
    drafter.watch(lambda number: draft_process.signal(signal.SIGSTOP) if number == 2 else None)
    got = target.run(PROMPTS, GREEDY, drafter)
    draft_process.signal(signal.SIGCONT)
    assert [req.output_ids for req in got] == [req.output_ids for req in plain]
    late = [duration_s for duration_s in drafter.durations_s[2:] if duration_s >= 0.2]
    assert len(late) == drafter.counters().num_late == 2
    assert max(late) < 0.2 + 1.0  # the machine's own delays
    drafter.shutdown()
    target.shutdown()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_faulty_messages_cost_no_token_and_every_page_returns(
    tiny_model: Path, seed: int, topk: int, params: SamplingParams
) -> None:
    spec = replace(SPEC, topk=topk, num_draft_tokens=5 if topk == 1 else 8)
    target = SoloTarget(worker_config(tiny_model, spec=spec, num_pages=256))
    proposer: Proposer = build_proposer(draft_config(tiny_model, spec, num_pages=32))
    link = FaultyLink(LocalLink(proposer), Faults.all(0.15), seed, VOCAB_SIZE)
    drafter = LinkDrafter(
        link, spec, vocab_size=VOCAB_SIZE, breaker=CircuitBreaker(max_failures=1 << 30)
    )
    plain = target.run(PROMPTS, params)
    got = target.run(PROMPTS, params, drafter)
    assert [req.output_ids for req in got] == [req.output_ids for req in plain]
    assert link.num_faults > 10
    assert drafter.counters().num_draft_rows > 5
    proposer.check()
    held = proposer.snapshot()
    assert held.req_ids == ()
    assert held.num_free_pages + held.num_cached_pages == held.num_pages
    target.shutdown()
