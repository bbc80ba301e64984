"""Tensor-parallel groups for tests: the leader in this process, the other ranks in their own."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess

from paceline.worker.config import ParallelConfig, WorkerConfig
from paceline.worker.entry import run_follower
from paceline.worker.parallel.rendezvous import reserve_rendezvous
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor

JOIN_TIMEOUT_S = 30.0
# One server imports torch once and forks the ranks of all tests from it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["paceline.worker.entry", "paceline.worker.target.build"])


def rank_configs(
    config: WorkerConfig, tp_size: int, rendezvous: str, timeout_s: float = 60.0
) -> list[WorkerConfig]:
    """The same config for each rank of a gloo group, one thread each."""
    parallel = ParallelConfig(
        tp_size=tp_size, backend="gloo", rendezvous=rendezvous, timeout_s=timeout_s
    )
    return [
        replace(config, parallel=replace(parallel, tp_rank=rank), num_threads=1)
        for rank in range(tp_size)
    ]


@contextmanager
def tp_executor(
    config: WorkerConfig, tp_size: int, *, timeout_s: float = 60.0
) -> Iterator[Executor]:
    """The leader's executor of a group of `tp_size` ranks, which all end with the block."""
    with tp_group(config, tp_size, timeout_s=timeout_s) as (executor, _):
        yield executor


@contextmanager
def tp_group(
    config: WorkerConfig, tp_size: int, *, timeout_s: float = 60.0
) -> Iterator[tuple[Executor, list[BaseProcess]]]:
    """As `tp_executor`, with the processes of the ranks above 0 for tests that harm them."""
    if tp_size == 1:
        executor = build_executor(replace(config, num_threads=1))
        yield executor, []
        executor.shutdown()
        return
    listener, rendezvous = reserve_rendezvous("127.0.0.1")
    leader, *others = rank_configs(config, tp_size, rendezvous, timeout_s)
    followers: list[BaseProcess] = [
        _context.Process(target=run_follower, args=(other,), daemon=True) for other in others
    ]
    for process in followers:
        process.start()
    try:
        executor = build_executor(leader, listener=listener)
        try:
            yield executor, followers
        finally:
            executor.shutdown()
        for process in followers:
            process.join(JOIN_TIMEOUT_S)
            assert not process.is_alive(), "a follower outlived its leader"
    finally:
        for process in followers:
            if process.is_alive():
                process.kill()
                process.join(JOIN_TIMEOUT_S)
