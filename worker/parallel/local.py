"""The collective of a group of one rank: every operation is its own result."""

from torch import Tensor

from paceline.worker.parallel.collective import Collective


class LocalCollective(Collective):
    tp_rank = 0
    tp_size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_last_dim(self, x: Tensor, sizes: list[int]) -> Tensor | None:
        assert sizes == [x.shape[-1]]
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def all_reduce_min(self, value: int) -> int:
        return value

    def shutdown(self) -> None:
        """Nothing is held."""
