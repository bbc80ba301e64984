"""RowTables: sampling parameters and token counts of reqs, on the device and keyed by row.

What the host path reads from a req's own lists is here in tensors, so that tokens which the host
has not seen yet count as well. Nothing here waits for the device. Tables as wide as the vocabulary
are made when a req first needs one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.worker.dense_sampler import (
    DenseParams,
    distribution_floats,
    is_sorted,
    kept_top_k,
)
from paceline.worker.logit_filters import MAX_PENALISED
from paceline.worker.noise import signed_seed
from paceline.worker.spec.commit import ending_token_ids
from paceline.worker.step import SamplingParams, SamplingRow

_GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0)


class RowTables:
    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], num_rows: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._num_rows = num_rows
        self._params = [_GREEDY] * num_rows
        # Columns: is_greedy, top_k, seed, first position at which the req may end.
        self._ints = to_device([_ints_of(_GREEDY, 0)] * num_rows, torch.int64, device)
        # Columns: temperature, top_p, min_p, frequency, presence and repetition penalty.
        self._floats = to_device([_floats_of(_GREEDY)] * num_rows, torch.float64, device)
        self._counts: Tensor | None = None  # [num_rows, V] int32, of each token in the output
        self._is_prompt: Tensor | None = None  # [num_rows, V] bool
        self._is_ending: Tensor | None = None  # [num_rows, V] bool, where min_tokens hold them back
        self._bias: Tensor | None = None  # [num_rows, V] fp32

    def open(self, rows: Sequence[int], sampling: Sequence[SamplingRow]) -> None:
        """Takes reqs in; what the rows held before is forgotten."""
        if not rows:
            return
        ints, floats = [], []
        for row, req in zip(rows, sampling, strict=True):
            params = self._params[row] = req.params
            ints.append(_ints_of(params, len(req.prompt_ids) + params.min_tokens))
            floats.append(_floats_of(params))
        index = to_device(list(rows), torch.int64, self._device)
        self._ints[index] = to_device(ints, torch.int64, self._device)
        self._floats[index] = to_device(floats, torch.float64, self._device)
        for row, req in zip(rows, sampling, strict=True):
            self._open_tables(row, req)

    def is_noisy(self, rows_cpu: Sequence[int]) -> bool:
        """Whether a req is drawn by chance."""
        return not all(self._params[row].is_greedy for row in rows_cpu)

    def is_sorted(self, rows_cpu: Sequence[int]) -> bool:
        """Whether a req is cut by top_k or top_p."""
        return any(is_sorted(self._params[row]) for row in rows_cpu)

    def is_adjusted(self, rows_cpu: Sequence[int]) -> bool:
        """Whether `adjust` changes anything."""
        return any(_is_adjusted(self._params[row]) for row in rows_cpu)

    def params(
        self, rows: Tensor, rows_cpu: Sequence[int], positions: Tensor, repeat: int = 1
    ) -> DenseParams | None:
        """Of `repeat` rows of logits for each of rows [bs]; None where all are greedy.

        positions: int64, one for each row of logits, in whatever shape.
        """
        if not self.is_noisy(rows_cpu):
            return None
        ints = self._ints[rows].repeat_interleave(repeat, 0).unbind(1)
        floats = self._floats[rows].repeat_interleave(repeat, 0).unbind(1)
        return DenseParams(
            is_greedy=ints[0].bool(),
            temperature=floats[0].float(),
            top_k=ints[1],
            top_p=floats[1].float(),
            min_p=floats[2].float(),
            seeds=ints[2],
            positions=positions.flatten(),
            is_sorted=self.is_sorted(rows_cpu),
        )

    def adjust(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_cpu: Sequence[int],
        positions: Tensor,
        token_ids: Tensor | None = None,
        is_on_path: Tensor | None = None,
    ) -> Tensor:
        """`logit_filters.adjust` of every node: logits [bs, n, V] fp32, those given unchanged.

        Args:
            rows, rows_cpu: [bs], the reqs.
            positions: [bs, n] int64, of the token chosen behind each node.
            token_ids, is_on_path: [bs, n] int64 and [bs, n, n] bool, as in NodeRows; None where
                no drafts stand behind the committed tokens.
        """
        adjusted = [b for b, row in enumerate(rows_cpu) if _is_adjusted(self._params[row])]
        if not adjusted:
            return logits
        index = to_device(adjusted, torch.int64, self._device)
        rows = rows[index]
        ints, floats = self._ints[rows], self._floats[rows]
        part = logits[index]
        if self._counts is not None and self._is_prompt is not None:
            counts, is_prompt = self._counts[rows], self._is_prompt[rows]
            path = None if is_on_path is None or token_ids is None else is_on_path[index]
            ids = None if token_ids is None else token_ids[index]
            part = _penalise_nodes(part, counts, is_prompt, floats[:, 3:], ids, path)
        if self._is_ending is not None:
            is_early = positions[index] < ints[:, 3:]
            is_held = is_early.unsqueeze(-1) & self._is_ending[rows].unsqueeze(1)
            part = part.masked_fill(is_held, -torch.inf)
        if self._bias is not None:
            part = part + self._bias[rows].unsqueeze(1)
        return part if len(adjusted) == len(rows_cpu) else logits.index_copy(0, index, part)

    def commit(self, rows: Tensor, new_ids: Tensor, num_new_tokens: Tensor) -> None:
        """Counts the first num_new_tokens[b] of new_ids [bs, n]; ids of no vocabulary aside."""
        if self._counts is None:
            return
        places = torch.arange(new_ids.shape[1], device=new_ids.device)
        is_known = (new_ids >= 0) & (new_ids < self._vocab_size)
        is_new = is_known & (places < num_new_tokens.unsqueeze(-1))
        cells = rows.unsqueeze(-1) * self._vocab_size + new_ids.clamp(0, self._vocab_size - 1)
        self._counts.view(-1).index_add_(0, cells.flatten(), is_new.flatten().int())

    def _open_tables(self, row: int, req: SamplingRow) -> None:
        params = req.params
        if params.has_penalties:
            self._counts = self._table(self._counts, torch.int32)
            self._is_prompt = self._table(self._is_prompt, torch.bool)
        if self._counts is not None and self._is_prompt is not None:
            self._counts[row] = 0
            self._is_prompt[row] = False
            if params.has_penalties:
                output = self._upload_ids(req.output_ids)
                ones = torch.ones_like(output, dtype=torch.int32)
                self._counts[row].index_add_(0, output, ones)
                self._is_prompt[row].index_fill_(0, self._upload_ids(req.prompt_ids), True)
        if params.min_tokens > 0:
            self._is_ending = self._table(self._is_ending, torch.bool)
        if self._is_ending is not None:
            ending = ending_token_ids(params, self._eos_token_ids) if params.min_tokens else ()
            self._is_ending[row] = False
            self._is_ending[row].index_fill_(0, self._upload_ids(ending), True)
        if params.logit_bias:
            self._bias = self._table(self._bias, torch.float32)
        if self._bias is not None:
            biases = {i: bias for i, bias in params.logit_bias if 0 <= i < self._vocab_size}
            values = to_device(list(biases.values()), torch.float32, self._device)
            self._bias[row] = 0.0
            self._bias[row].index_copy_(0, self._upload_ids(biases), values)

    def _table(self, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        if table is not None:
            return table
        return torch.zeros(self._num_rows, self._vocab_size, dtype=dtype, device=self._device)

    def _upload_ids(self, token_ids: "Sequence[int] | frozenset[int] | dict[int, float]") -> Tensor:
        """Those of the vocabulary, in order."""
        ids = np.fromiter(token_ids, dtype=np.int64)
        return to_device(ids[(ids >= 0) & (ids < self._vocab_size)], torch.int64, self._device)


def _ints_of(params: SamplingParams, first_end: int) -> tuple[int, int, int, int]:
    return params.is_greedy, kept_top_k(params), signed_seed(params.seed), first_end


def _floats_of(params: SamplingParams) -> tuple[float, ...]:
    penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
    return (*distribution_floats(params), *penalties)


def _is_adjusted(params: SamplingParams) -> bool:
    return params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0


def _penalise_nodes(
    logits: Tensor,
    counts: Tensor,
    is_prompt: Tensor,
    penalties: Tensor,
    token_ids: Tensor | None,
    is_on_path: Tensor | None,
) -> Tensor:
    """logits [m, n, V] less the penalties [m, 3] on what counts and is_prompt [m, V] say, and on
    the tokens on the way to each node, of which there are few."""
    vocab_size = logits.shape[-1]
    penalised = _penalise(logits, counts.unsqueeze(1), is_prompt.unsqueeze(1), penalties)
    if token_ids is None or is_on_path is None:
        return penalised
    is_known = (token_ids >= 0) & (token_ids < vocab_size)
    ids = token_ids.clamp(0, vocab_size - 1)  # [m, n]
    is_equal = (ids.unsqueeze(2) == ids.unsqueeze(1)) & is_known.unsqueeze(2)
    # How often node j's token stands on the way to node i; right for every j, so that all places
    # below may be written, and those written twice get one value.
    on_path = torch.bmm(is_on_path.float(), is_equal.float()).int()
    places = ids.unsqueeze(1).expand(on_path.shape)
    values = _penalise(
        logits.gather(2, places),
        counts.gather(1, ids).unsqueeze(1) + on_path,
        is_prompt.gather(1, ids).unsqueeze(1),
        penalties,
    )
    return penalised.scatter(2, places, values)


def _penalise(logits: Tensor, counts: Tensor, is_prompt: Tensor, penalties: Tensor) -> Tensor:
    """Of tokens in the last dimension, [m, n, _] each or [m, 1, _]; penalties [m, 3] fp64."""
    frequency, presence, repetition = penalties.view(-1, 3, 1, 1).unbind(1)
    repetition = repetition.float()
    changed = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = changed.clamp(-MAX_PENALISED, MAX_PENALISED)
    is_repeat = (is_prompt | (counts > 0)) & (repetition != 1.0) & logits.isfinite()
    logits = torch.where(is_repeat, changed, logits)
    penalty = (frequency * counts + presence).float()
    return torch.where(counts > 0, logits - penalty, logits)


def to_device(
    values: "Sequence[object] | np.ndarray[tuple[int], np.dtype[np.int64]]",
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Host values on the device; through pinned memory, so that a GPU's queue is not waited for."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
