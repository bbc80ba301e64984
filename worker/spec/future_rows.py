"""FutureRows: what an overlapped step leaves for the next, kept on the device by req_pool_index.

The step behind it is planned while these are still being computed, so no number of them reaches the
host. A row means something from the req's last prompt chunk on; until then, and after the req, it
holds whatever it held, and nobody reads it. Row 0 is padding's, an empty req. Pure.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.worker.spec.draft_input import EagleDraftInput

_FIRST_CANDIDATE = 2  # in the ints of a row, behind seq_len and verified_id


@dataclass(frozen=True, slots=True)
class Rows:
    """The reqs of a launch, on the device and on the host; row 0, as often as it likes, pads.

    ints: [2, bs] int64 that hold `index`, each one's req_pool_index, and `owned_lens`, how many
        tokens it has slots for.
    """

    ints: Tensor
    index: Tensor
    owned_lens: Tensor
    index_cpu: tuple[int, ...]

    @classmethod
    def of(cls, ints: Tensor, index_cpu: tuple[int, ...]) -> "Rows":
        return cls(ints, ints[0], ints[1], index_cpu)

    @classmethod
    def upload(
        cls, index_cpu: tuple[int, ...], owned_lens: tuple[int, ...], device: torch.device
    ) -> "Rows":
        ints = upload_ints(index_cpu + owned_lens, device).view(2, len(index_cpu))
        return cls.of(ints, index_cpu)

    @property
    def bs(self) -> int:
        return len(self.index_cpu)


class FutureRows:
    """All of it on every rank but the candidates, which tp_rank 0 alone knows."""

    def __init__(self, num_rows: int, topk: int, device: torch.device) -> None:
        self._topk = topk
        # One column per row: seq_len, verified_id, candidates.
        self._ints = torch.zeros(
            _FIRST_CANDIDATE + topk, num_rows, dtype=torch.int64, device=device
        )
        self._topk_p = torch.zeros(num_rows, topk, dtype=torch.float32, device=device)
        self._hidden: Tensor | None = None  # [num_rows, hidden_size], of the first that is stored

    def look_up(self, rows: Rows, topk: int) -> EagleDraftInput:
        """What the rows' next step starts from, with the best `topk` of their candidates."""
        assert topk <= self._topk, (topk, self._topk)
        hidden = self._hidden
        ints = self._ints.index_select(1, rows.index)
        return EagleDraftInput(
            req_pool_indices=rows.index,
            req_pool_indices_cpu=rows.index_cpu,
            verified_id=ints[1],
            topk_p=self._topk_p.index_select(0, rows.index)[:, :topk],
            topk_index=ints[_FIRST_CANDIDATE : _FIRST_CANDIDATE + topk].T,
            hidden_states=None if hidden is None else hidden.index_select(0, rows.index),
            new_seq_lens=ints[0],
        )

    def store(
        self,
        rows: Rows,
        seq_lens: Tensor,
        verified_id: Tensor,
        hidden: Tensor,
        candidates: tuple[Tensor, Tensor] | None,
    ) -> None:
        """What the next step starts from.

        Args:
            seq_lens, verified_id: [bs] int64.
            hidden: [bs, hidden_size], of the draft.
            candidates: [bs, topk] fp32 and int64, best first, in draft vocabulary.
        """
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._ints.shape[1], hidden.shape[1])
        self._hidden.index_copy_(0, rows.index, hidden)
        ints = [seq_lens[None], verified_id[None]]
        if candidates is not None:
            topk_p, topk_index = candidates
            self._topk_p.index_copy_(0, rows.index, topk_p)
            ints.append(topk_index.T)
        stored = self._ints if candidates is not None else self._ints[:_FIRST_CANDIDATE]
        stored.index_copy_(1, rows.index, torch.cat(ints))
        self._ints[:, 0].zero_()  # padding's length would grow


def upload_ints(values: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64 on the device, without waiting for what the device still has to do."""
    ints = torch.tensor(values, dtype=torch.int64)
    return ints if device.type == "cpu" else ints.pin_memory().to(device, non_blocking=True)
