"""A rank whose numbers are not its leader's: tp_rank 0 chooses for both, step by step."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from paceline.worker.config import Overlap, ParallelConfig, SpecMethod, VerifyRule, WorkerConfig
from paceline.worker.parallel.rendezvous import reserve_rendezvous
from paceline.worker.spec.eagle_overlap import OverlapPath
from paceline.worker.spec.eagle_sync import SyncPath
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.colocated import GREEDY, SAMPLED, ColocatedTarget, config_of, spec_config
from tests.colocated_models import ColocatedModels, make_colocated_models

PROMPTS = [[5, 9, 33, 77, 2, 4, 100], [7 + i for i in range(15)], [30, 31]]
Standing = list[tuple[int, int, int]]  # (row, seq_len, verified_id)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


@contextmanager
def two_ranks(config: WorkerConfig) -> Iterator[tuple[Executor, Executor, ThreadPoolExecutor]]:
    """Leader and follower, each built in a thread of its own."""
    listener, rendezvous = reserve_rendezvous("127.0.0.1")
    parallel = ParallelConfig(2, 0, "gloo", rendezvous, timeout_s=30.0)
    with ThreadPoolExecutor(2) as pool:
        follower: Future[Executor] = pool.submit(
            build_executor, replace(config, parallel=replace(parallel, tp_rank=1))
        )
        leader = build_executor(replace(config, parallel=parallel), listener=listener)
        try:
            yield leader, follower.result(), pool
        finally:
            leader.shutdown()


def standing_of(executor: Executor) -> Standing:
    """Where a rank believes its reqs to be."""
    path = executor._path
    if isinstance(path, OverlapPath):
        seq_lens, verified_ids = path._state._ints[:2].tolist()
        return list(zip(range(len(seq_lens)), seq_lens, verified_ids, strict=True))
    assert isinstance(path, SyncPath)
    state = path._state
    if state is None:
        return []
    assert state.new_seq_lens is not None
    assert state.verified_id is not None
    lens, ids = state.new_seq_lens.tolist(), state.verified_id.tolist()
    return sorted(zip(state.req_pool_indices_cpu, lens, ids, strict=True))


def record(executor: Executor, name: str) -> list[Standing]:
    """Where the reqs are after each step that a rank's path is asked for."""
    seen: list[Standing] = []
    path = executor._path
    step: Callable[..., object] = getattr(path, name)

    def wrapped(*args: object) -> object:
        result = step(*args)
        seen.append(standing_of(executor))
        return result

    setattr(path, name, wrapped)
    return seen


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("eagle3", 3), ("standalone", 2)])
def test_ranks_that_compute_otherwise_agree_on_every_token(
    models: ColocatedModels, method: SpecMethod, topk: int, overlap: Overlap, rule: VerifyRule
) -> None:
    draft = models.drafts[method]
    spec = replace(spec_config(method, draft, topk=topk), overlap=overlap, rule=rule)
    with two_ranks(config_of(models.target, spec)) as (leader, follower, pool):
        norm = follower._runner.model._norm  # in front of its logits and its features
        norm._weight = torch.randn(norm._weight.shape, generator=torch.Generator().manual_seed(0))
        told, followed = record(leader, "launch"), record(follower, "follow")
        follows = pool.submit(follower.follow)
        target = ColocatedTarget(leader, chunk_size=6)
        reqs = target.make_reqs(PROMPTS, [GREEDY, SAMPLED, GREEDY])
        target.run(reqs)
        leader.shutdown()
        follows.result(timeout=30.0)
    assert len(told) > 10
    assert followed == told
