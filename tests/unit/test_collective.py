"""Ranks of a group in processes: sums, gathers and bytes agree, and a silent peer is noticed."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch._C._distributed_c10d import Store

from paceline.worker.config import ParallelConfig
from paceline.worker.errors import ConfigError, Unavailable
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.rendezvous import connect, reserve_rendezvous
from paceline.worker.parallel.shared_memory import SLOT_BYTES, join_shared_memory
from paceline.worker.parallel.torch_collective import TorchCollective

T = TypeVar("T")


@contextmanager
def ranks(
    tp_size: int,
    timeout_s: float = 20.0,
    *,
    use_shared_memory: bool = True,
    sums_in_rank_order: bool = False,
) -> Iterator[list[Collective]]:
    """The collectives of a gloo group whose ranks are threads of this process."""
    listener, rendezvous = reserve_rendezvous("127.0.0.1")
    config = ParallelConfig(
        tp_size=tp_size, backend="gloo", rendezvous=rendezvous, timeout_s=timeout_s
    )
    configs = [replace(config, tp_rank=rank) for rank in range(tp_size)]
    with ThreadPoolExecutor(tp_size) as pool:
        joins = [
            pool.submit(
                connect,
                c,
                "cpu",
                listener if c.tp_rank == 0 else None,
                use_shared_memory=use_shared_memory,
                sums_in_rank_order=sums_in_rank_order,
            )
            for c in configs
        ]
        group = [join.result(timeout_s) for join in joins]
    try:
        yield group
    finally:
        for collective in group:
            collective.shutdown()


def on_all(group: list[Collective], act: Callable[[Collective], T]) -> list[Future[T]]:
    with ThreadPoolExecutor(len(group)) as pool:
        return [pool.submit(act, collective) for collective in group]


both_ways = pytest.mark.parametrize(
    "use_shared_memory", [True, False], ids=["shared memory", "gloo"]
)


@both_ways
def test_ranks_meet_on_loopback_and_compute_together(use_shared_memory: bool) -> None:
    with ranks(3, use_shared_memory=use_shared_memory) as group:
        sums = on_all(group, lambda c: c.all_reduce(torch.full((2, 3), float(c.tp_rank + 1))))
        assert [s.result().tolist() for s in sums] == [[[6.0] * 3] * 2] * 3

        least = on_all(group, lambda c: c.all_reduce_min(10 - c.tp_rank))
        assert [m.result() for m in least] == [8, 8, 8]

        sizes = [3, 1, 2]
        parts = on_all(
            group,
            lambda c: c.gather_last_dim(torch.full((2, sizes[c.tp_rank]), float(c.tp_rank)), sizes),
        )
        joined = parts[0].result()
        assert joined is not None
        assert joined.tolist() == [[0.0, 0.0, 0.0, 1.0, 2.0, 2.0]] * 2
        assert parts[1].result() is parts[2].result() is None


@both_ways
def test_narrow_types_are_summed_in_fp32(use_shared_memory: bool) -> None:
    # In bf16, 256 + 1 is 256; the sum of the three is not.
    values = [256.0, 1.0, 1.0]
    with ranks(3, use_shared_memory=use_shared_memory) as group:
        sums = on_all(
            group,
            lambda c: c.all_reduce(torch.tensor([values[c.tp_rank]], dtype=torch.bfloat16)),
        )
        for result in sums:
            assert result.result().dtype == torch.bfloat16
            assert result.result().tolist() == [258.0]


@both_ways
def test_every_rank_gets_the_same_bits_round_after_round(use_shared_memory: bool) -> None:
    num_rounds = 200
    gen = torch.Generator().manual_seed(0)
    # Lengths on both sides of what fits a slot, and none.
    lengths = [0, 1, 7, 576, SLOT_BYTES // 4, SLOT_BYTES // 4 + 1]
    xs = [torch.randn(3, n, generator=gen) for n in lengths]

    def run(c: Collective) -> list[torch.Tensor]:
        return [c.all_reduce(xs[i % len(xs)][c.tp_rank].clone()) for i in range(num_rounds)]

    with ranks(3, use_shared_memory=use_shared_memory) as group:
        first, *others = [f.result() for f in on_all(group, run)]
    for i, x in enumerate(first):
        torch.testing.assert_close(x, xs[i % len(xs)].sum(0))
        assert all(torch.equal(x, other[i]) for other in others)


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_rank_order_have_the_same_bits_whatever_else_is_summed(
    dtype: torch.dtype, use_shared_memory: bool
) -> None:
    gen = torch.Generator().manual_seed(0)
    xs = torch.randn(3, SLOT_BYTES // 4 + 5, generator=gen).to(dtype)
    want = (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype)
    with ranks(3, use_shared_memory=use_shared_memory, sums_in_rank_order=True) as group:
        for start, stop in ((0, xs.shape[1]), (5, 12), (0, 1000), (7, xs.shape[1])):
            sums = on_all(
                group, lambda c, a=start, b=stop: c.all_reduce(xs[c.tp_rank, a:b].clone())
            )
            for got in sums:
                assert torch.equal(got.result(), want[start:stop])


@both_ways
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_a_tensor_of_rank_0_reaches_every_rank_in_place(
    dtype: torch.dtype, use_shared_memory: bool
) -> None:
    shapes = [(), (0, 4), (3, 5), (SLOT_BYTES // 8 + 1,)]  # the last fits no slot in int64
    with ranks(3, use_shared_memory=use_shared_memory) as group:
        for shape in shapes:
            own = [torch.full(shape, float(c.tp_rank + 1), dtype=dtype) for c in group]
            got = [f.result() for f in on_all(group, lambda c, xs=own: c.broadcast(xs[c.tp_rank]))]
            for x, y in zip(own, got, strict=True):
                assert x is y
                assert torch.equal(x, torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("num_bytes", [0, 1, 4088, 4089, 100_000])
def test_bytes_of_any_length_reach_every_rank(num_bytes: int) -> None:
    data = bytes(i % 251 for i in range(num_bytes))
    with ranks(2) as group:
        got = on_all(group, lambda c: c.broadcast_bytes(data if c.tp_rank == 0 else None))
        assert [g.result() for g in got] == [data, data]


def test_a_silent_peer_is_unavailable_after_the_timeout_with_rank_and_operation() -> None:
    with ranks(2, timeout_s=0.5) as group:
        with pytest.raises(Unavailable, match=r"tp_rank 1 of 2: broadcast failed or outlasted 0.5"):
            group[1].broadcast_bytes(None)
        with pytest.raises(Unavailable, match="tp_rank 1 of 2"):
            group[1].all_reduce(torch.ones(1))


@both_ways
def test_a_peer_that_does_not_sum_is_unavailable_after_the_timeout(
    use_shared_memory: bool,
) -> None:
    failed = pytest.raises(Unavailable, match="tp_rank 1 of 2: all_reduce failed")
    with ranks(2, timeout_s=0.3, use_shared_memory=use_shared_memory) as group, failed:
        group[1].all_reduce(torch.ones(1))


@both_ways
def test_a_peer_that_leaves_wakes_those_who_sum(use_shared_memory: bool) -> None:
    two_ranks = ranks(2, timeout_s=60.0, use_shared_memory=use_shared_memory)
    with two_ranks as group, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group[1].all_reduce, torch.ones(1))
        group[0].shutdown()
        with pytest.raises(Unavailable, match="tp_rank 1 of 2"):
            waiting.result(20.0)


def test_a_peer_that_leaves_after_a_sum_takes_nothing_back() -> None:
    with ranks(2) as group, ThreadPoolExecutor(1) as pool:
        early = group[0]
        assert isinstance(early, TorchCollective)
        assert early._memory is not None
        sum_of_early = pool.submit(early.all_reduce, torch.full((1,), 3.0))
        deadline_s = time.monotonic() + 20.0
        while early._memory._counters[0] < 1:
            assert time.monotonic() < deadline_s
        early._memory.close()  # before the other has looked whether it came
        assert group[1].all_reduce(torch.ones(1)).item() == 4.0
        assert sum_of_early.result(20.0).item() == 4.0


def test_shared_memory_leaves_no_name_behind() -> None:
    before = set(Path("/dev/shm").glob("paceline-*"))
    with ranks(2) as group:
        assert set(Path("/dev/shm").glob("paceline-*")) <= before
        assert isinstance(group[0], TorchCollective)
        assert group[0].has_shared_memory


def test_shared_memory_leaves_no_name_behind_when_a_rank_does_not_come() -> None:
    before = set(Path("/dev/shm").glob("paceline-*"))
    with pytest.raises(RuntimeError):
        join_shared_memory(_LonelyStore(), 0, 2, 1.0)
    assert set(Path("/dev/shm").glob("paceline-*")) <= before


class _LonelyStore(Store):
    """Rank 0's view of a group whose other rank never says a word."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        if key not in self._values:
            raise RuntimeError("wait timeout after 1000ms")
        return self._values[key]


def test_a_peer_that_leaves_wakes_those_who_wait_for_it() -> None:
    with ranks(2, timeout_s=60.0) as group:
        errors: list[Exception] = []

        def wait() -> None:
            try:
                group[1].broadcast_bytes(None)
            except Unavailable as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        group[0].shutdown()
        waiter.join(20.0)
        assert not waiter.is_alive()
        assert len(errors) == 1


def test_ranks_that_do_not_come_are_unavailable_with_the_address() -> None:
    listener, rendezvous = reserve_rendezvous("127.0.0.1")
    config = ParallelConfig(tp_size=2, backend="gloo", rendezvous=rendezvous, timeout_s=0.5)
    with pytest.raises(Unavailable, match=rf"tp_rank 0 of 2: rendezvous at {rendezvous}"):
        connect(config, "cpu", listener)


def test_a_leader_that_is_not_there_is_unavailable() -> None:
    listener, rendezvous = reserve_rendezvous("127.0.0.1")
    listener.close()
    config = ParallelConfig(
        tp_size=2, tp_rank=1, backend="gloo", rendezvous=rendezvous, timeout_s=0.5
    )
    with pytest.raises(Unavailable, match="tp_rank 1 of 2: rendezvous"):
        connect(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ParallelConfig(tp_size=2, tp_rank=2, backend="gloo"), "tp_rank is 2"),
        (ParallelConfig(tp_size=2, rendezvous="127.0.0.1:1"), "backend 'local' has one rank"),
        (ParallelConfig(tp_size=2, backend="gloo", rendezvous="here"), "rendezvous is 'here'"),
        (ParallelConfig(tp_size=2, backend="nccl", rendezvous="127.0.0.1:0"), "rendezvous is"),
    ],
)
def test_a_group_that_cannot_be_is_a_config_error(config: ParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        connect(config)


def test_a_group_of_one_needs_no_address() -> None:
    collective = connect(ParallelConfig())
    x = torch.ones(2, 3)
    assert collective.all_reduce(x) is x
    assert collective.gather_last_dim(x, [3]) is x
    assert collective.broadcast_bytes(b"x") == b"x"
    assert collective.all_reduce_min(4) == 4
    collective.shutdown()
