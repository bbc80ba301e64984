"""Whether two answers are the same tokens, and of those that are not, whether it was a tie. Pure.

Sums are rounded otherwise in a batch of another shape, so two tokens whose scores are next to equal
may change places. That is a flip: it happens without speculation as well. A token that lost by
more than rounding can explain is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.worker.noise import host_gumbel, host_noise_bits, noise_key
from paceline.worker.step import SamplingParams

Logits = NDArray[np.float64]

# Of the greatest logit, in units of the type's precision: how far rounding moves a logit.
_TIE_ROUNDINGS = 3.0
_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where an answer is not what it should be."""

    prompt: int
    position: int  # of the output
    wanted: int | None  # token; None: the answer should have ended
    got: int | None
    gap: float  # by how much the wanted token's score is above the other's
    tie: float  # a gap of as much is one

    @property
    def is_tie(self) -> bool:
        return self.gap <= self.tie


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """What came of one comparison of all prompts."""

    name: str
    num_tokens: int  # compared: up to an error
    differences: tuple[Difference, ...]
    num_steps: int
    num_proposed: int
    num_accepted: int
    are_flips_allowed: bool = True

    @property
    def flips(self) -> list[Difference]:
        return [d for d in self.differences if d.is_tie]

    @property
    def errors(self) -> list[Difference]:
        return [d for d in self.differences if not (d.is_tie and self.are_flips_allowed)]


def first_difference(wanted: Sequence[int], got: Sequence[int]) -> int | None:
    for i, (a, b) in enumerate(zip(wanted, got, strict=False)):
        if a != b:
            return i
    return None if len(wanted) == len(got) else min(len(wanted), len(got))


def judge_difference(
    prompt: int,
    prompt_ids: Sequence[int],
    wanted: Sequence[int],
    got: Sequence[int],
    position: int,
    params: SamplingParams,
    dtype: str,
    next_logits: Callable[[Sequence[int]], Logits],
) -> Difference:
    """How the two tokens at `position` compare where the model is asked afresh."""
    ids = [*prompt_ids, *wanted[:position]]
    a = wanted[position] if position < len(wanted) else None
    b = got[position] if position < len(got) else None
    if a is None or b is None:
        return Difference(prompt, position, a, b, float("inf"), 0.0)
    logits = next_logits(ids)
    temperature = params.temperature or 1.0
    scores = logits[[a, b]] / temperature
    if not params.is_greedy:
        key = noise_key(params.seed, len(ids))
        scores += host_gumbel(host_noise_bits(key, np.array([a, b])))
    tie = _TIE_ROUNDINGS * _EPSILON[dtype] * float(np.abs(logits).max()) / temperature
    # Either may be the one that the model prefers when asked in one piece.
    return Difference(prompt, position, a, b, abs(float(scores[0] - scores[1])), tie)
