"""Groups of several ranks in processes of their own, over gloo on loopback."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.worker.config import CacheConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from paceline.worker.errors import ConfigError, Unavailable
from paceline.worker.models.registry import load_model_config
from paceline.worker.step import Heartbeat, Phase, ReqStep, SamplingParams, SamplingRow
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.plans import make_rows, plan
from tests.tiny import make_tiny_model
from tests.tp import tp_executor, tp_group

PROMPT = [5, 9, 33, 77, 2, 4, 100, 200, 7, 7, 31, 64, 255, 1, 0, 263, 18, 90, 12, 13]
GREEDY = SamplingParams(seed=0, max_tokens=64, temperature=0.0)


def config_of(path: Path, dtype: str = "float32") -> WorkerConfig:
    return WorkerConfig(
        load_model_config(path, max_model_len=128, dtype=dtype),
        cache=CacheConfig(page_size=4, num_pages=100),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


def run_mixed_steps(executor: Executor) -> list[torch.Tensor]:
    """Logits of a prompt in chunks, decodes, a tree, and a decode behind its moved branch."""
    a, b = make_rows(2, executor.num_pages, executor.page_size)
    steps = [
        plan(a.step(PROMPT[:7]), b.step(PROMPT[3:9])),
        plan(b.step([8], Phase.DECODE), a.step(PROMPT[7:], num_logits=1)),
    ]
    logits = [executor.forward(step) for step in steps]
    tree = a.step([50, 60, 61, 70], Phase.VERIFY, parents=(-1, 0, 0, 2), commit=0)
    logits.append(executor.forward(plan(tree)))
    assert logits[-1] is not None
    # Let the target "want" the second branch: node 2 below the root.
    reply = executor.execute(
        plan(
            a.step(
                [50, 60, int(logits[-1][0].argmax())], Phase.VERIFY, parents=(-1, 0, 0), commit=2
            )
        ),
        [SamplingRow(GREEDY, PROMPT, [50])],
    )
    assert reply.rows[0].accept_length == 1
    logits.append(executor.forward(plan(a.step([reply.rows[0].new_ids[-1]], Phase.DECODE))))
    return [x.clone() for x in logits if x is not None]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size"),
    [
        pytest.param(9, 3, 2, id="9 over 3 on 2, uneven"),
        pytest.param(9, 3, 4, id="9 over 3 on 4, KV heads replicated"),
        pytest.param(4, 1, 3, id="4 over 1 on 3, one KV head"),
    ],
)
def test_a_group_computes_what_one_rank_does(
    tmp_path: Path, num_heads: int, num_kv_heads: int, tp_size: int
) -> None:
    # 97 feed-forward columns and 264 ids are even on no group.
    path = make_tiny_model(
        tmp_path / "model",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=97,
        num_layers=2,
        tie_word_embeddings=tp_size != 3,
        num_shards=2,
    )
    config = config_of(path)
    want = run_mixed_steps(build_executor(config))
    with tp_executor(config, tp_size) as executor:
        assert (executor.tp_rank, executor.tp_size) == (0, tp_size)
        got = run_mixed_steps(executor)
    assert len(got) == len(want) == 4
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_a_group_stays_near_fp32_in_bf16(tiny_model: Path) -> None:
    (row,) = make_rows(1, 100, 4)
    want = build_executor(config_of(tiny_model)).forward(plan(row.step(PROMPT)))
    (row,) = make_rows(1, 100, 4)
    with tp_executor(config_of(tiny_model, "bfloat16"), 2) as executor:
        got = executor.forward(plan(row.step(PROMPT)))
        assert got is not None
        assert want is not None
        assert (got - want).norm() / want.norm() < 0.05


def test_a_lost_rank_makes_the_leader_unavailable_within_the_timeout(tiny_model: Path) -> None:
    with tp_group(config_of(tiny_model), 2, timeout_s=20.0) as (executor, followers):
        (row,) = make_rows(1, executor.num_pages, executor.page_size)
        executor.forward(plan(row.step(PROMPT)))
        followers[0].kill()
        followers[0].join(10.0)
        step = plan(row.step([1], Phase.DECODE))
        for _ in range(2):  # at once the second time: the group is known to be lost
            with pytest.raises(Unavailable, match="tp_rank 0 of 2"):
                executor.forward(step)


def test_a_follower_whose_leader_is_gone_ends_with_an_error(tiny_model: Path) -> None:
    with tp_group(config_of(tiny_model), 2, timeout_s=20.0) as (executor, followers):
        executor._collective.shutdown()  # as when the process dies: nothing is said
        followers[0].join(15.0)
        assert followers[0].exitcode == 1


def test_a_step_that_fails_on_the_leader_ends_the_group_at_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tp_group(config_of(tiny_model), 2, timeout_s=20.0) as (executor, followers):
        (row,) = make_rows(1, executor.num_pages, executor.page_size)
        monkeypatch.setattr(executor._runner, "forward", fail)
        with pytest.raises(MemoryError):
            executor.forward(plan(row.step(PROMPT)))
        followers[0].join(15.0)
        assert followers[0].exitcode == 1
        monkeypatch.undo()
        with pytest.raises(Unavailable, match="step 0 failed: MemoryError"):
            executor.forward(plan(row.step([1], Phase.DECODE)))


def test_heartbeats_and_refused_plans_leave_a_group_as_it_was(tiny_model: Path) -> None:
    with tp_group(config_of(tiny_model), 2) as (executor, _):
        (row,) = make_rows(1, executor.num_pages, executor.page_size)
        executor._send(Heartbeat())
        with pytest.raises(AssertionError):
            executor.forward(plan(ReqStep(99, Phase.PREFILL, 0, (1,), pages=(1,))))
        executor._send(Heartbeat())
        assert executor.forward(plan(row.step(PROMPT))) is not None


def test_more_ranks_than_heads_are_refused_before_anyone_waits(tiny_model: Path) -> None:
    parallel = ParallelConfig(tp_size=10, backend="gloo", rendezvous="127.0.0.1:1")
    with pytest.raises(ConfigError, match="tp_size is 10, but the model has 9 query heads"):
        build_executor(replace(config_of(tiny_model), parallel=parallel))


def fail(*_: object) -> None:
    raise MemoryError
