"""A collective over one of torch's process groups: gloo between CPUs, nccl between GPUs.

The process group is the collective's own, never torch's global default: a process may belong to
several groups, a target's and a draft's.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.worker.errors import Unavailable
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.shared_memory import SharedMemory

# Any: torch's stubs know the backends, not their operations.
Backend = Any

# A plan of a full batch of decodes fits; a longer message takes a second broadcast.
_HEAD_BYTES = 4096
_LEN_BYTES = 8
# Ranks meet in `all_reduce_min` after loading, which may take far longer than a step.
_START_TIMEOUT_S = 900.0


class TorchCollective(Collective):
    """Args:
    group: the process group of exactly this group's ranks.
    store: where the ranks met; kept alive as long as the group.
    device: where the tensors handed in lie.
    timeout_s: of one operation.
    memory: carries small tensors between CPUs of one machine; owned by the collective.
    sums_in_rank_order: sums of more than two ranks are alike, to the last bit, whatever the shape.
        gloo's own begin each part of a tensor at another rank.
    """

    def __init__(
        self,
        group: Backend,
        store: Store,
        device: str,
        timeout_s: float,
        memory: SharedMemory | None = None,
        *,
        sums_in_rank_order: bool = False,
    ) -> None:
        self.tp_rank = int(group.rank())
        self.tp_size = int(group.size())
        self._group = group
        self._store = store
        self._memory = memory
        self._sums_in_rank_order = sums_in_rank_order
        self._device = torch.device(device)
        self._timeout_s = timeout_s
        self._failure = ""
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._sum.timeout = timedelta(seconds=timeout_s)
        self._from_leader = dist.BroadcastOptions()
        self._from_leader.rootRank = 0
        self._from_leader.timeout = timedelta(seconds=timeout_s)
        self._to_leader = dist.GatherOptions()
        self._to_leader.rootRank = 0
        self._to_leader.timeout = timedelta(seconds=timeout_s)

    @property
    def has_shared_memory(self) -> bool:
        return self._memory is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._memory is not None and self._memory.fits(x.numel(), torch.float32):
            # In the order of ranks, so that all of them get the same bits.
            return _sum_of(self._exchange("all_reduce", x, torch.float32)).to(x.dtype)
        if self._sums_in_rank_order and self.tp_size > 2:
            return self._sum_in_rank_order(x.float()).to(x.dtype)
        if x.is_cuda or x.dtype == torch.float32:
            self._run("all_reduce", lambda: self._group.allreduce([x], self._sum))
            return x
        # gloo would round to the narrow type after every hop.
        wide = x.float()
        self._run("all_reduce", lambda: self._group.allreduce([wide], self._sum))
        return wide.to(x.dtype)

    def _sum_in_rank_order(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.tp_size)]
        self._run("all_gather", lambda: self._group.allgather([parts], [x.contiguous()]))
        return _sum_of(parts)

    def gather_last_dim(self, x: Tensor, sizes: list[int]) -> Tensor | None:
        assert len(sizes) == self.tp_size
        assert x.shape[-1] == sizes[self.tp_rank]
        # Both backends gather equal shapes only, so all send the width of the widest.
        width = max(sizes)
        if x.shape[-1] < width:
            x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        x = x.contiguous()
        if self._memory is not None and self._memory.fits(x.numel(), x.dtype):
            shared = self._exchange("gather", x, x.dtype)
            if self.tp_rank != 0:
                return None
            return torch.cat([p[..., :n] for p, n in zip(shared, sizes, strict=True)], dim=-1)
        parts = [torch.empty_like(x) for _ in sizes] if self.tp_rank == 0 else []
        outputs = [parts] if self.tp_rank == 0 else []
        self._run("gather", lambda: self._group.gather(outputs, [x], self._to_leader))
        if self.tp_rank != 0:
            return None
        return torch.cat([p[..., :n] for p, n in zip(parts, sizes, strict=True)], dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        if self._memory is not None and self._memory.fits(x.numel(), x.dtype):
            parts = self._exchange("broadcast", x, x.dtype)
            return x if self.tp_rank == 0 else x.copy_(parts[0])
        self._run("broadcast", lambda: self._group.broadcast([x], self._from_leader))
        return x

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        head = bytearray(_HEAD_BYTES)
        first = _HEAD_BYTES - _LEN_BYTES
        if self.tp_rank == 0:
            assert data is not None
            head[:_LEN_BYTES] = len(data).to_bytes(_LEN_BYTES, "little")
            head[_LEN_BYTES : _LEN_BYTES + min(len(data), first)] = data[:first]
        head = self._broadcast(head)
        num_bytes = int.from_bytes(head[:_LEN_BYTES], "little")
        rest = bytearray(max(num_bytes - first, 0))
        if rest:
            if self.tp_rank == 0:
                assert data is not None
                rest[:] = data[first:]
            rest = self._broadcast(rest)
        if self.tp_rank == 0:
            assert data is not None
            return data
        return bytes(head[_LEN_BYTES : _LEN_BYTES + min(num_bytes, first)] + rest)

    def all_reduce_min(self, value: int) -> int:
        x = torch.tensor([value], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        options.timeout = timedelta(seconds=max(self._timeout_s, _START_TIMEOUT_S))
        self._run("all_reduce_min", lambda: self._group.allreduce([x], options))
        return int(x.item())

    def shutdown(self) -> None:
        """Closes the connections; a rank that waits for this one then fails at once."""
        if self._group is not None:
            self._failure = self._failure or "the group is shut down"
            if self._memory is not None:
                self._memory.close()
            self._group.abort()
            # gloo closes its connections when the last reference goes, and not before.
            self._group = None

    def _broadcast(self, data: bytearray) -> bytearray:
        x = torch.frombuffer(data, dtype=torch.uint8)
        if self._device.type == "cpu":
            self._run("broadcast", lambda: self._group.broadcast([x], self._from_leader))
            return data
        on_device = x.to(self._device)
        self._run("broadcast", lambda: self._group.broadcast([on_device], self._from_leader))
        return bytearray(on_device.cpu().numpy().tobytes())

    def _exchange(self, name: str, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
        assert self._memory is not None
        self._check()
        try:
            return self._memory.exchange(x, dtype)
        except Unavailable as error:
            self._failure = f"{name} failed: {error}"
            raise self._unavailable() from error

    def _check(self) -> None:
        if self._failure:
            raise self._unavailable()

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"tp_rank {self.tp_rank} of {self.tp_size}: {self._failure}")

    def _run(self, name: str, start: Callable[[], dist.Work]) -> None:
        self._check()
        try:
            start().wait()
        except RuntimeError as error:
            self._failure = f"{name} failed or outlasted {self._timeout_s:g} s: {describe(error)}"
            raise self._unavailable() from error


def _sum_of(parts: list[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def describe(error: Exception) -> str:
    """What torch says, without its source path, its advice and its stack."""
    text = str(error).split("\n", 1)[0]
    text = re.sub(r"^\[[^\]]*:\d+\] ", "", text)
    return text.split(". This is typically", 1)[0]
