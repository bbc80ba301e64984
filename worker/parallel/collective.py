"""Collective: what the ranks of one group say to each other; one rank, or torch's gloo and nccl."""

from abc import ABC, abstractmethod

from torch import Tensor


class Collective(ABC):
    """Tensor-parallel communication of one group.

    Every rank calls the same operations in the same order. A call that outlasts the group's
    timeout raises `Unavailable`; the group is then unusable.
    """

    tp_rank: int
    tp_size: int

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place where it can be; returns the sum."""

    @abstractmethod
    def gather_last_dim(self, x: Tensor, sizes: list[int]) -> Tensor | None:
        """Concatenates [..., sizes[rank]] of all ranks on rank 0; None elsewhere."""

    @abstractmethod
    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's values, in place; returns x. x is contiguous, of one shape and dtype on all."""

    @abstractmethod
    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0 passes bytes, the others None; all get rank 0's bytes."""

    @abstractmethod
    def all_reduce_min(self, value: int) -> int: ...

    @abstractmethod
    def shutdown(self) -> None: ...
