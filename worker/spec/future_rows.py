"""FutureRows: what an overlapped step leaves for the next, kept on the device by req_pool_index.

The step behind it is planned while these are still being computed, so no number of them reaches the
host. A row means something from the req's last prompt chunk on; until then, and after the req, it
holds whatever it held, and nobody reads it. Pure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.worker.spec.draft_input import EagleDraftInput


@dataclass(frozen=True, slots=True)
class Rows:
    """The reqs of a launch, on the device and on the host."""

    index: Tensor  # [bs] int64
    index_cpu: tuple[int, ...]

    @classmethod
    def upload(cls, rows: tuple[int, ...], device: torch.device) -> "Rows":
        return cls(upload_ints(rows, device), rows)

    def repeat(self, times: int) -> "Rows":
        """Each row `times` times in succession."""
        repeated = tuple(row for row in self.index_cpu for _ in range(times))
        return Rows(self.index.repeat_interleave(times), repeated)


class FutureRows:
    """All of it on every rank but the candidates, which tp_rank 0 alone knows."""

    def __init__(self, num_rows: int, topk: int, device: torch.device) -> None:
        self._topk = topk
        self._seq_lens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._verified_id = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._topk_p = torch.zeros(num_rows, topk, dtype=torch.float32, device=device)
        self._topk_index = torch.zeros(num_rows, topk, dtype=torch.int64, device=device)
        self._hidden: Tensor | None = None  # [num_rows, hidden_size], of the first that is stored

    def look_up(self, rows: Rows, topk: int) -> EagleDraftInput:
        """What the rows' next step starts from, with the best `topk` of their candidates."""
        assert topk <= self._topk, (topk, self._topk)
        hidden = self._hidden
        return EagleDraftInput(
            req_pool_indices=rows.index,
            req_pool_indices_cpu=rows.index_cpu,
            verified_id=self._verified_id[rows.index],
            topk_p=self._topk_p[rows.index, :topk],
            topk_index=self._topk_index[rows.index, :topk],
            hidden_states=None if hidden is None else hidden[rows.index],
            new_seq_lens=self._seq_lens[rows.index],
        )

    def store_ids(self, rows: Rows, seq_lens: Tensor, verified_id: Tensor) -> None:
        """seq_lens, verified_id [bs] int64."""
        self._seq_lens.index_copy_(0, rows.index, seq_lens)
        self._verified_id.index_copy_(0, rows.index, verified_id)

    def store_candidates(self, rows: Rows, topk_p: Tensor, topk_index: Tensor) -> None:
        """[bs, topk] fp32 and int64, best first, in draft vocabulary."""
        self._topk_p.index_copy_(0, rows.index, topk_p)
        self._topk_index.index_copy_(0, rows.index, topk_index)

    def store_hidden(self, rows: Rows, hidden: Tensor) -> None:
        """hidden [bs, hidden_size]."""
        if self._hidden is None:
            self._hidden = hidden.new_zeros(len(self._seq_lens), hidden.shape[1])
        self._hidden.index_copy_(0, rows.index, hidden)


def upload_ints(values: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64 on the device, without waiting for what the device still has to do."""
    ints = torch.tensor(values, dtype=torch.int64)
    return ints if device.type == "cpu" else ints.pin_memory().to(device, non_blocking=True)
