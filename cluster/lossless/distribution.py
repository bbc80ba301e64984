"""Whether sampled tokens are distributed as the model says: Pearson's test over short texts. Pure.

The texts that may follow a prompt are put into cells: those of `depth` tokens that are each among
the `width` likeliest of their place, and for each beginning of such a text one more cell for all
other tokens. The cells cover everything, and their probabilities are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float64]
Cell = tuple[int, ...]
OTHER = -1  # at the end of a cell: any token without a cell of its own

_MIN_EXPECTED = 5.0  # samples in a cell; Cochran, Biometrics 10 (1954)


@dataclass(frozen=True, slots=True)
class DistributionCheck:
    prompt: int
    num_samples: int
    num_cells: int  # after small ones were put together
    statistic: float
    p_value: float
    limit: float  # a p-value below it is no chance

    @property
    def is_met(self) -> bool:
        return self.p_value >= self.limit


def make_cells(
    next_logits: Callable[[Sequence[int]], Logits],
    prompt_ids: Sequence[int],
    *,
    depth: int,
    width: int,
    temperature: float,
) -> dict[Cell, float]:
    """The probability of each cell; they sum to 1."""
    cells: dict[Cell, float] = {}
    begun: list[tuple[Cell, float]] = [((), 1.0)]
    while begun:
        text, reached = begun.pop()
        probs = _softmax(next_logits([*prompt_ids, *text]) / temperature)
        likeliest = np.argsort(-probs, kind="stable")[:width]
        cells[(*text, OTHER)] = reached * max(0.0, 1.0 - float(probs[likeliest].sum()))
        for token in likeliest.tolist():
            longer, prob = (*text, token), reached * float(probs[token])
            if len(longer) == depth:
                cells[longer] = prob
            else:
                begun.append((longer, prob))
    return cells


def cell_of(cells: Mapping[Cell, float], output_ids: Sequence[int]) -> Cell:
    """Raises KeyError: the output is shorter than the cells are deep."""
    for length in range(1, len(output_ids) + 1):
        if (cell := tuple(output_ids[:length])) in cells:
            return cell
        # A beginning that has no cell of other tokens was not followed further.
        if (*cell, OTHER) not in cells:
            return (*cell[:-1], OTHER)
    raise KeyError(tuple(output_ids))


def check_distribution(
    prompt: int, cells: Mapping[Cell, float], outputs: Sequence[Sequence[int]], limit: float
) -> DistributionCheck:
    counts = dict.fromkeys(cells, 0)
    for output_ids in outputs:
        counts[cell_of(cells, output_ids)] += 1
    num_samples = len(outputs)
    groups = _group([(cells[cell] * num_samples, counts[cell]) for cell in cells])
    statistic = sum((count - expected) ** 2 / expected for expected, count in groups)
    return DistributionCheck(
        prompt, num_samples, len(groups), statistic, _p_value(statistic, len(groups) - 1), limit
    )


def _group(cells: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """(expected, count) with the rarest cells put together until all are large enough."""
    rest = sorted(cells)
    while len(rest) > 1 and rest[0][0] < _MIN_EXPECTED:
        (expected, count), (other, more) = rest[0], rest[1]
        rest = sorted([(expected + other, count + more), *rest[2:]])
    return rest


def _p_value(statistic: float, degrees: int) -> float:
    """The chance of a greater statistic; 1 where there is but one cell."""
    if degrees < 1:
        return 1.0
    import torch  # the only incomplete gamma function at hand

    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _softmax(z: Logits) -> Logits:
    weights: Logits = np.exp(z - z.max())
    weights /= weights.sum()
    return weights
