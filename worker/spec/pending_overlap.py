"""PendingOverlap: a launched step whose results are on their way to the host."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.worker.row_results import row_result
from paceline.worker.step import Phase, RowResult, SamplingRow, StepPlan, StepReply


class HostCopy:
    """Tensors, int64 or fp32, that reach the host as one copy; only `read` waits for it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [(x.shape, x.dtype) for x in tensors]
        parts = [x if x.dtype == torch.int64 else x.view(torch.int32).long() for x in tensors]
        nothing = torch.empty(0, dtype=torch.int64)
        self._flat = torch.cat([part.flatten() for part in parts]) if parts else nothing
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
        parts = self._flat.split([shape.numel() for shape, _ in self._kinds])
        return [
            (part if dtype == torch.int64 else part.int().view(torch.float32)).view(shape)
            for part, (shape, dtype) in zip(parts, self._kinds, strict=True)
        ]


class PendingOverlap:
    def __init__(
        self,
        plan: StepPlan,
        sampling: Sequence[SamplingRow | None],
        speculated: Sequence[Tensor],
        drawn: Sequence[Tensor],
        *,
        is_simulated: bool,
    ) -> None:
        """
        Args:
            speculated: of the SPECULATE rows, in order: new ids [bs, width], accept_length and
                number of drafts [bs], then log-probabilities [bs, width] if any wants them; empty
                without such rows.
            drawn: of the other rows that want logits: ids [n], log-probabilities [n] if any.
            is_simulated: acceptance is made up.
        """
        self._plan = plan
        self._wants_logprobs = [req is not None and req.wants_logprobs for req in sampling]
        self._is_simulated = is_simulated
        self._num_speculated = len(speculated)
        self._copy = HostCopy([*speculated, *drawn])

    def collect(self) -> StepReply:
        tensors = self._copy.read()
        speculated = self._read_speculated(tensors[: self._num_speculated])
        drawn = _read_drawn(tensors[self._num_speculated :])
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

    def _read_speculated(self, tensors: Sequence[Tensor]) -> Iterator[RowResult]:
        if not tensors:
            return
        ids, accept_lengths, num_real, *logprobs = (x.tolist() for x in tensors)
        for b, accept_length in enumerate(accept_lengths):
            width = accept_length + 1
            yield row_result(
                ids[b][:width],
                logprobs[0][b][:width] if logprobs else (),
                num_proposed=num_real[b],
                is_simulated=self._is_simulated,
            )


def _read_drawn(tensors: Sequence[Tensor]) -> Iterator[RowResult]:
    if not tensors:
        return
    ids, *logprobs = (x.tolist() for x in tensors)
    for i, token in enumerate(ids):
        yield row_result([token], logprobs[0][i : i + 1] if logprobs else ())
