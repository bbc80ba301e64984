"""An executor's steps: accepted branches, failures, and what followers hear of them."""

from pathlib import Path

import pytest
import torch

from paceline.worker.clock import FakeClock
from paceline.worker.config import CacheConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from paceline.worker.errors import Unavailable
from paceline.worker.models.registry import load_model_config
from paceline.worker.parallel.local import LocalCollective
from paceline.worker.step import (
    Heartbeat,
    LeaderMessage,
    Phase,
    ReqStep,
    SamplingParams,
    SamplingRow,
    Shutdown,
    decode_message,
)
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.plans import make_rows, plan

PROMPT = [5, 9, 33, 77, 2, 4, 100]
GREEDY = SamplingParams(seed=0, max_tokens=8, temperature=0.0)


@pytest.fixture
def executor(tiny_model: Path) -> Executor:
    return build_executor(
        WorkerConfig(
            load_model_config(tiny_model, max_model_len=64),
            cache=CacheConfig(page_size=4, num_pages=40),
            scheduler=SchedulerConfig(max_num_seqs=2),
            num_threads=1,
        )
    )


class Heard(LocalCollective):
    """Rank 0 of a group of two whose other rank only listens."""

    tp_size = 2

    def __init__(self) -> None:
        self.messages: list[LeaderMessage] = []

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        self.messages.append(decode_message(data))
        return data


@pytest.fixture
def heard(executor: Executor) -> tuple[Executor, Heard, FakeClock]:
    """The leader of a pretended group with a timeout of 8 s."""
    config = WorkerConfig(executor.config.model, parallel=ParallelConfig(timeout_s=8.0))
    collective, clock = Heard(), FakeClock()
    return Executor(config, executor._runner, collective, clock), collective, clock


def decode_greedily(executor: Executor, num_tokens: int) -> list[int]:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    output: list[int] = []
    step = row.step(PROMPT, num_logits=1)
    for _ in range(num_tokens):
        reply = executor.execute(plan(step), [SamplingRow(GREEDY, PROMPT, output)])
        output += reply.rows[0].new_ids
        step = row.step(output[-1:], Phase.DECODE)
    return output


def test_a_verified_branch_gives_the_tokens_of_plain_decoding(executor: Executor) -> None:
    want = decode_greedily(executor, 6)
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    output: list[int] = []
    sampling = [SamplingRow(GREEDY, PROMPT, output)]
    reply = executor.execute(plan(row.step(PROMPT, num_logits=1)), sampling)
    output += reply.rows[0].new_ids
    assert output == want[:1]
    # The right guesses are nodes 2 and 4, so their KV must be moved in line.
    wrong = [(token + 1) % 200 for token in want]
    tree = row.step(
        [want[0], wrong[1], want[1], wrong[2], want[2]],
        Phase.VERIFY,
        parents=(-1, 0, 0, 1, 2),
        commit=3,
    )
    reply = executor.execute(plan(tree, step_id=7), sampling)
    assert (reply.step_id, reply.rows[0].accept_length) == (7, 2)
    output += reply.rows[0].new_ids
    assert output == want[:4]
    while len(output) < 6:
        reply = executor.execute(plan(row.step(output[-1:], Phase.DECODE)), sampling)
        output += reply.rows[0].new_ids
    assert output == want


def test_a_chunk_before_the_last_gives_no_token(executor: Executor) -> None:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    reply = executor.execute(plan(row.step(PROMPT[:3], num_logits=0)), [None])
    assert reply.rows[0].new_ids == ()


def test_a_failed_step_of_one_rank_costs_that_step_only(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = decode_greedily(executor, 2)
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    step = plan(row.step(PROMPT, num_logits=1))
    kernels = executor.kernels
    calls = 0

    def fail_late(gate_up: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return kernels.silu_and_mul(gate_up)

    for layer in executor._runner.model._layers:
        monkeypatch.setattr(layer.mlp, "_activate", fail_late)
    sampling = [SamplingRow(GREEDY, PROMPT, [])]
    with pytest.raises(MemoryError):
        executor.execute(step, sampling)
    reply = executor.execute(step, sampling)
    assert list(reply.rows[0].new_ids) == want[:1]


def test_followers_hear_an_idle_leader_several_times_within_their_timeout(
    heard: tuple[Executor, Heard, FakeClock],
) -> None:
    executor, collective, clock = heard
    for _ in range(80):
        executor.heartbeat()
        clock.advance(0.1)
    assert 3 <= len(collective.messages) <= 4
    assert set(map(type, collective.messages)) == {Heartbeat}


def test_a_plan_that_cannot_be_is_not_sent(heard: tuple[Executor, Heard, FakeClock]) -> None:
    executor, collective, _ = heard
    with pytest.raises(AssertionError):
        executor.forward(plan(ReqStep(50, Phase.PREFILL, 0, (1,), pages=(1,))))
    assert collective.messages == []


def test_a_shut_down_executor_says_so(heard: tuple[Executor, Heard, FakeClock]) -> None:
    executor, collective, _ = heard
    executor.shutdown()
    executor.shutdown()
    assert collective.messages == [Shutdown()]
    with pytest.raises(Unavailable, match="shut down"):
        executor.forward(plan(ReqStep(0, Phase.PREFILL, 0, (1,), pages=(1,))))
