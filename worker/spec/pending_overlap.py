"""PendingOverlap: a launched step whose results are on their way to the host."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.worker.row_results import row_result
from paceline.worker.step import Phase, RowResult, SamplingRow, StepPlan, StepReply


@dataclass(frozen=True, slots=True)
class Reported:
    """What the host is told of some rows.

    ints: [n or more, columns] int64: `num_ids` ids; then of rows that speculated accept_length and
        the number of their drafts; then the bits of as many fp32 log-probabilities as there are
        ids, if the batch has any.
    """

    ints: Tensor
    num_ids: int

    @classmethod
    def of(cls, columns: Sequence[Tensor], logprobs: Tensor | None) -> "Reported":
        """columns: [n, _] int64, the ids first; logprobs: fp32, in the shape of the ids."""
        told = list(columns)
        if logprobs is not None:
            told.append(logprobs.view(torch.int32).long())
        return cls(told[0] if len(told) == 1 else torch.cat(told, 1), columns[0].shape[1])


class HostCopy:
    """Int64 tensors that reach the host as one copy; only `read` waits for it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [x.shape for x in tensors]
        nothing = torch.empty(0, dtype=torch.int64)
        parts = [x.flatten() for x in tensors]
        self._flat = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else nothing
        self._done: torch.cuda.Event | None = None
        if self._flat.is_cuda:
            host = torch.empty(self._flat.shape, dtype=torch.int64, pin_memory=True)
            host.copy_(self._flat, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._flat, self._done = host, event

    def read(self) -> list[Tensor]:
        if self._done is not None:
            self._done.synchronize()
        parts = self._flat.split([shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class PendingOverlap:
    def __init__(
        self,
        plan: StepPlan,
        sampling: Sequence[SamplingRow | None],
        speculated: Reported | None,
        drawn: Reported | None,
        *,
        is_simulated: bool,
    ) -> None:
        """
        Args:
            speculated: of the SPECULATE rows, in order, then perhaps of padding.
            drawn: of the other rows that want logits, one id each.
            is_simulated: acceptance is made up.
        """
        self._plan = plan
        self._wants_logprobs = [req is not None and req.wants_logprobs for req in sampling]
        self._is_simulated = is_simulated
        self._parts = [speculated, drawn]
        self._copy = HostCopy([part.ints for part in self._parts if part is not None])

    def collect(self) -> StepReply:
        tensors = iter(self._copy.read())
        rows = [[] if part is None else next(tensors).tolist() for part in self._parts]
        speculated, drawn = self._read_speculated(rows[0]), self._read_drawn(rows[1])
        results = []
        for row, wants_logprobs in zip(self._plan.rows, self._wants_logprobs, strict=True):
            if row.phase is Phase.SPECULATE:
                result = next(speculated)
            elif row.num_logits:
                result = next(drawn)
            else:
                result = RowResult()
            results.append(result if wants_logprobs else replace(result, logprobs=()))
        return StepReply(self._plan.step_id, tuple(results))

    def _read_speculated(self, rows: Sequence[list[int]]) -> Iterator[RowResult]:
        part = self._parts[0]
        for row in rows:
            assert part is not None
            accept_length, num_real = row[part.num_ids : part.num_ids + 2]
            num_new = accept_length + 1
            yield row_result(
                row[:num_new],
                _floats_of(row[part.num_ids + 2 :])[:num_new],
                num_proposed=num_real,
                is_simulated=self._is_simulated,
            )

    def _read_drawn(self, rows: Sequence[list[int]]) -> Iterator[RowResult]:
        for row in rows:
            yield row_result(row[:1], _floats_of(row[1:]))


def _floats_of(bits: Sequence[int]) -> tuple[float, ...]:
    """fp32 of the bits of as many int32."""
    return struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))
