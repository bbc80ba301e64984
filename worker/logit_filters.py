"""What a req's params do to one row of logits: adjust them, scale them, cut the unlikely.

A cut is a threshold: the tokens kept are those whose log-probability is at least some value, and
tokens tied with the last one kept are kept too. So cuts combine by the greatest threshold, and
none needs the vocabulary sorted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.worker.spec.commit import ending_token_ids
from paceline.worker.step import SamplingParams

Floats = NDArray[np.float32]

# Colder is greedy up to rounding; it keeps the division from overflowing.
MIN_TEMPERATURE = 1e-5
# A mass within this of `top_p` has reached it: fp32 logits do not know it any better.
TOP_P_TOLERANCE = 1e-6
# Where a repetition penalty may take a finite logit: far enough to decide, and every difference of
# two, divided by the least temperature, is still a number.
MAX_PENALISED = 1e30
_FIRST_SORTED = 512  # the nucleus of nearly every row is smaller


@dataclass(frozen=True, slots=True)
class LogitRow:
    """The req behind one row of logits, and where in its text the row stands.

    `path_ids` are draft tokens between the committed ones and the token to be chosen, which has
    absolute position `position`. The lists are the req's own, read only.
    """

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    path_ids: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + len(self.path_ids)

    @property
    def lacks_min_tokens(self) -> bool:
        return len(self.output_ids) + len(self.path_ids) < self.params.min_tokens

    @property
    def has_adjustments(self) -> bool:
        """Whether `adjust` may change a logit."""
        params = self.params
        return params.has_penalties or bool(params.logit_bias) or self.lacks_min_tokens

    @property
    def is_plain(self) -> bool:
        """Whether the token is the argmax of the logits as they are."""
        return self.params.is_greedy and not self.has_adjustments


def adjust(logits: Tensor, row: LogitRow, eos_token_ids: tuple[int, ...]) -> None:
    """Applies penalties, min_tokens and logit_bias to logits [vocab_size] fp32, in place.

    The repetition penalty divides positive logits and multiplies others, of all tokens of prompt
    and output; presence and frequency penalties are subtracted for tokens of the output. Tokens
    of the path count as output, so a node of a tree is treated as its token would be without
    speculation. Ids outside the vocabulary are ignored.
    """
    params = row.params
    vocab_size = len(logits)
    if params.repetition_penalty != 1.0:
        seen = _known_ids((row.prompt_ids, row.output_ids, row.path_ids), vocab_size)
        ids = torch.from_numpy(np.unique(seen)).to(logits.device)
        values = logits[ids]
        penalty = params.repetition_penalty
        changed = torch.where(values > 0, values / penalty, values * penalty)
        changed.clamp_(-MAX_PENALISED, MAX_PENALISED)
        logits[ids] = torch.where(values.isfinite(), changed, values)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        output = _known_ids((row.output_ids, row.path_ids), vocab_size)
        unique, counts = np.unique(output, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(unique).to(logits.device)] -= _fp32(penalties, logits)
    if row.lacks_min_tokens:
        ending = _known_ids((ending_token_ids(params, eos_token_ids),), vocab_size)
        logits[torch.from_numpy(ending).to(logits.device)] = -torch.inf
    if params.logit_bias:
        biases = {i: bias for i, bias in params.logit_bias if 0 <= i < vocab_size}
        ids = torch.tensor(list(biases), dtype=torch.int64, device=logits.device)
        logits[ids] += _fp32(list(biases.values()), logits)


def _known_ids(lists: Iterable[Iterable[int]], vocab_size: int) -> NDArray[np.int64]:
    ids = np.fromiter(chain.from_iterable(lists), dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _fp32(values: NDArray[np.floating] | list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)


def scale(logits: Floats, temperature: float) -> Floats:
    """(logits - max) / temperature: log-probabilities up to a constant, 0 at the best.

    The maximum goes first, so that fp32 is finest where tokens compete. The logits hold no NaN and
    their maximum is finite.
    """
    z: Floats = logits - logits.max()
    if temperature != 1.0:
        z /= np.float32(max(temperature, MIN_TEMPERATURE))
    return z


def cut(z: Floats, params: SamplingParams) -> Floats:
    """-inf for the tokens that top_k, top_p and min_p exclude; z is as `scale` returns it."""
    threshold = keep_threshold(z, params)
    if threshold is None:
        return z
    return np.where(z >= threshold, z, np.float32(-np.inf))


def keep_threshold(z: Floats, params: SamplingParams) -> np.float32 | None:
    """The least value kept; None keeps everything."""
    thresholds = []
    kept = z
    if 0 < params.top_k < len(z):
        thresholds.append(_kth_greatest(z, params.top_k))
        kept = z[z >= thresholds[0]]
    if params.top_p < 1.0:
        thresholds.append(_top_p_threshold(kept, params.top_p))
    if params.min_p > 0.0:
        # Rounding log(1.0) or a product must never cut the best token, which stands at 0.
        thresholds.append(np.float32(min(np.log(params.min_p), 0.0)))
    return max(thresholds, default=None)


def _kth_greatest(z: Floats, k: int) -> np.float32:
    value: np.float32 = np.partition(z, len(z) - k)[len(z) - k]
    return value


def _top_p_threshold(z: Floats, top_p: float) -> np.float32:
    """The level at which the mass from the top reaches top_p of all of z's."""
    wanted = (top_p - TOP_P_TOLERANCE) * np.exp(z).sum(dtype=np.float64)
    num_sorted = _FIRST_SORTED
    while True:
        top = z
        if num_sorted < len(z):
            top = np.partition(z, len(z) - num_sorted)[len(z) - num_sorted :]
        top = np.sort(top)[::-1]
        mass = np.exp(top).cumsum(dtype=np.float64)
        if mass[-1] >= wanted or len(top) == len(z):
            value: np.float32 = top[min(int(np.searchsorted(mass, wanted)), len(top) - 1)]
            return value
        num_sorted *= 8
