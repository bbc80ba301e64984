"""The judgements of `verify-lossless`: what is a tie, and what is no chance."""

from collections.abc import Sequence
from math import log

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.cluster.lossless.distribution import (
    OTHER,
    cell_of,
    check_distribution,
    make_cells,
)
from paceline.cluster.lossless.prompts import MAX_PROMPTS
from paceline.cluster.lossless.run import Options, Report
from paceline.cluster.lossless.tokens import (
    Difference,
    TokenCheck,
    first_difference,
    judge_difference,
)
from paceline.worker.errors import ConfigError
from paceline.worker.noise import host_gumbel, host_noise_bits, noise_key
from paceline.worker.step import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
SEEDED = SamplingParams(seed=3, max_tokens=4, temperature=0.5)
PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])


def memoryless(ids: Sequence[int]) -> NDArray[np.float64]:
    """The token behind 1 is the next one; else by PROBS."""
    logits: NDArray[np.float64] = np.log(PROBS)
    return np.roll(logits, 1) if ids[-1] == 1 else logits


@pytest.mark.parametrize(
    ("wanted", "got", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_the_first_difference_is_a_token_or_an_end(
    wanted: list[int], got: list[int], place: int | None
) -> None:
    assert first_difference(wanted, got) == place


def judge(
    logits: list[float], params: SamplingParams = GREEDY, dtype: str = "bfloat16"
) -> Difference:
    asked: list[list[int]] = []

    def next_logits(ids: Sequence[int]) -> NDArray[np.float64]:
        asked.append(list(ids))
        return np.array(logits)

    found = judge_difference(0, [7, 8], [9, 0], [9, 1], 1, params, dtype, next_logits)
    assert asked == [[7, 8, 9]]
    return found


def test_a_tie_is_what_rounding_of_the_type_explains() -> None:
    assert judge([16.0, 16.1, 2.0]).is_tie
    assert judge([16.1, 16.0, 2.0]).is_tie
    assert not judge([16.0, 15.0, 2.0]).is_tie
    assert not judge([16.0, 16.1, 2.0], dtype="float32").is_tie
    assert judge([16.0, 16.00001, 2.0], dtype="float32").is_tie
    # The same gap between small logits is more than rounding.
    assert not judge([1.0, 1.1, 0.5]).is_tie


def test_a_sampled_token_is_judged_with_its_noise() -> None:
    noise = host_gumbel(host_noise_bits(noise_key(SEEDED.seed, 3), np.array([0, 1])))
    level = SEEDED.temperature * float(noise[0] - noise[1])
    assert judge([10.0, 10.0 + level, 2.0], SEEDED).is_tie
    assert judge([10.0, 10.0 + level, 2.0], SEEDED).gap == pytest.approx(0.0, abs=1e-5)
    assert not judge([10.0, 10.0 + level + 1.0, 2.0], SEEDED).is_tie


def test_an_answer_of_another_length_is_no_tie() -> None:
    found = judge_difference(0, [7], [1, 2], [1], 1, GREEDY, "bfloat16", memoryless)
    assert (found.wanted, found.got, found.is_tie) == (2, None, False)


def test_where_steps_are_deterministic_a_flip_is_an_error() -> None:
    flip = Difference(0, 1, 5, 6, gap=0.1, tie=0.2)
    check = TokenCheck("greedy", 9, (flip,), num_steps=3, num_proposed=8, num_accepted=4)
    assert (check.flips, check.errors) == ([flip], [])
    assert Report((check,), ()).is_lossless
    strict = TokenCheck("greedy", 9, (flip,), 3, 8, 4, are_flips_allowed=False)
    assert strict.errors == [flip]
    assert not Report((strict,), ()).is_lossless


def test_where_nothing_was_drafted_nothing_is_shown() -> None:
    check = TokenCheck("greedy", 9, (), num_steps=9, num_proposed=0, num_accepted=0)
    assert not Report((check,), ()).is_lossless


def test_cells_cover_everything_once() -> None:
    cells = make_cells(memoryless, [0], depth=2, width=2, temperature=1.0)
    assert sum(cells.values()) == pytest.approx(1.0)
    # Behind token 1 the likeliest are 1 and 2; behind token 0 they are 0 and 1.
    assert set(cells) == {(OTHER,), (0, OTHER), (0, 0), (0, 1), (1, OTHER), (1, 1), (1, 2)}
    assert cells[0, 1] == pytest.approx(0.4 * 0.3)
    assert cells[1, 1] == pytest.approx(0.3 * 0.4)
    assert cells[(OTHER,)] == pytest.approx(0.3)
    texts = [(a, b) for a in range(5) for b in range(5)]
    by_cell = dict.fromkeys(cells, 0.0)
    for a, b in texts:
        second = np.exp(memoryless([a]))
        by_cell[cell_of(cells, [a, b, 4])] += float(PROBS[a] * second[b] / second.sum())
    assert by_cell == pytest.approx(cells)


def test_temperature_changes_the_cells_as_it_changes_samples() -> None:
    cells = make_cells(memoryless, [0], depth=1, width=1, temperature=0.5)
    assert cells[(0,)] == pytest.approx(PROBS[0] ** 2 / (PROBS**2).sum())


def test_an_output_shorter_than_the_cells_is_refused() -> None:
    cells = make_cells(memoryless, [0], depth=2, width=2, temperature=1.0)
    with pytest.raises(KeyError):
        cell_of(cells, [0])


def sample(probs: NDArray[np.float64], n: int, seed: int) -> list[list[int]]:
    rand = np.random.default_rng(seed)
    return [[int(token)] for token in rand.choice(len(probs), size=n, p=probs)]


def test_samples_of_the_model_pass_and_others_fail() -> None:
    cells = make_cells(memoryless, [0], depth=1, width=5, temperature=1.0)
    fair = [check_distribution(0, cells, sample(PROBS, 400, seed), 1e-3) for seed in range(200)]
    assert sum(not check.is_met for check in fair) <= 2
    # p-values of what is true are spread evenly.
    assert 0.4 < np.mean([check.p_value for check in fair]) < 0.6
    tilted = PROBS**0.6 / (PROBS**0.6).sum()
    bad = [check_distribution(0, cells, sample(tilted, 400, seed), 1e-3) for seed in range(20)]
    assert sum(check.is_met for check in bad) <= 3
    assert not check_distribution(0, cells, [[0]] * 400, 1e-3).is_met


def test_the_statistic_and_its_chance_are_pearsons() -> None:
    cells = {(0,): 0.5, (1,): 0.25, (OTHER,): 0.25}
    outputs = [[0]] * 60 + [[1]] * 20 + [[2]] * 20
    check = check_distribution(0, cells, outputs, 1e-3)
    assert check.statistic == pytest.approx(100 / 50 + 25 / 25 + 25 / 25)
    # Two degrees of freedom: exp(-x / 2).
    assert log(check.p_value) == pytest.approx(-2.0)


def test_rare_cells_are_put_together() -> None:
    cells = {(0,): 0.97, (1,): 0.01, (2,): 0.01, (OTHER,): 0.01}
    check = check_distribution(0, cells, [[0]] * 97 + [[1], [2], [3]], 1e-3)
    assert check.num_cells == 1
    assert check.p_value == 1.0
    check = check_distribution(0, cells, [[0]] * 194 + [[1], [2], [3]] * 2, 1e-3)
    assert check.num_cells == 2


@pytest.mark.parametrize(
    "options",
    [
        Options(num_prompts=0),
        Options(num_prompts=MAX_PROMPTS + 1),
        Options(max_tokens=1),
        Options(num_samples=5),
        Options(num_samples=-1),
        Options(temperature=0.0),
        Options(temperature=float("nan")),
    ],
)
def test_options_that_show_nothing_are_refused(options: Options) -> None:
    with pytest.raises(ConfigError):
        options.check()
    Options().check()
