"""Acceptance made up for benchmarks: how many tokens a step yields, whatever was drafted. Pure.

A step's number is drawn once for all its reqs, from the step's number alone.
"""

import math

from paceline.worker.config import SpecConfig
from paceline.worker.noise import noise_key

_SEED = 0x5EED
_WORD = 2.0**32


def simulated_num_new_tokens(spec: SpecConfig, step_id: int, num_steps: int) -> int:
    """Tokens with the bonus that each req of a step gets, in 1..num_steps + 1.

    match-expected: one of the two whole numbers around `simulated_accept_length`, so that it is
    their mean. multinomial: a normal variable around it of deviation 1, rounded.

    Args:
        step_id: the number of the step; equal numbers give equal results.
        num_steps: how deep the trees are.
    """
    high, low = noise_key(_SEED, step_id)
    u, v = (high + 0.5) / _WORD, low / _WORD
    wanted, most = spec.simulated_accept_length, num_steps + 1
    if spec.simulated_method == "multinomial":
        # Box and Muller, 1958.
        normal = math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)
        return round(min(max(wanted + normal, 1.0), float(most)))
    wanted = min(max(wanted, 1.0), float(most))
    return math.floor(wanted) + (u < wanted - math.floor(wanted))
