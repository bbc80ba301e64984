"""Penalties, bias and cuts of one row of logits, against vectors worked by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.worker.dense_sampler import DenseParams, cut_dense
from paceline.worker.logit_filters import LogitRow, adjust, cut, scale
from paceline.worker.step import SamplingParams

ROWS = {
    "falling": [0.4, 0.3, 0.2, 0.1],
    "level": [0.25, 0.25, 0.25, 0.25],
    "tied": [0.5, 0.2, 0.2, 0.1],
}


def params(**kw: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 1, "max_tokens": 9} | kw))


def adjusted(
    logits: list[float],
    *,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    path: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
    **kw: Any,
) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float32)
    adjust(row, LogitRow(params(**kw), prompt, output, path), eos)
    return row.tolist()


def test_frequency_penalty_and_bias_add_up() -> None:
    kw: dict[str, Any] = {"frequency_penalty": 0.5, "logit_bias": ((2, -100.0),)}
    assert adjusted([1, 2, 3, 0], output=(1,), **kw) == [1, 1.5, -97, 0]
    assert adjusted([0, 1, 0, 4], output=(1,), **kw) == [0, 0.5, -100, 4]


def test_a_run_of_three_tokens_counts_each_of_them() -> None:
    """After x, y, x were emitted in one step, the counts are x: 2, y: 1."""
    logits = adjusted([0, 0, 0, 0], output=(3, 1, 3), frequency_penalty=1.0)
    assert logits == [0, -1, 0, -2]


def test_presence_counts_once_and_neither_counts_the_prompt() -> None:
    logits = adjusted(
        [0, 0, 0, 0], prompt=(0,), output=(1, 1), presence_penalty=0.5, frequency_penalty=0.25
    )
    assert logits == [0, -1, 0, 0]


def test_repetition_penalty_shrinks_positive_and_grows_negative_logits() -> None:
    logits = adjusted([4, -4, 4, -4], prompt=(0, 0), output=(1,), repetition_penalty=2.0)
    assert logits == [2, -8, 4, -4]


def test_tokens_of_the_path_count_as_output() -> None:
    kw: dict[str, Any] = {"repetition_penalty": 2.0, "frequency_penalty": 1.0}
    committed = adjusted([4, 4, 4, 4], prompt=(0,), output=(1, 2, 2), **kw)
    assert adjusted([4, 4, 4, 4], prompt=(0,), output=(1,), path=(2, 2), **kw) == committed


def test_ending_ids_are_impossible_before_min_tokens() -> None:
    kw: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (3,), "eos": (2,)}
    assert adjusted([1, 1, 1, 1], output=(0,), **kw) == [1, 1, -np.inf, -np.inf]
    assert adjusted([1, 1, 1, 1], output=(0,), path=(0,), **kw) == [1, 1, 1, 1]


def test_ids_that_do_not_end_the_req_are_not_held_back_by_min_tokens() -> None:
    logits = adjusted([1, 1, 1, 1], min_tokens=2, ignore_eos=True, eos=(2,))
    assert logits == [1, 1, 1, 1]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    logits = adjusted(
        [1, 1],
        prompt=(9,),
        output=(-1, 7),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        logit_bias=((5, 3.0), (-1, 3.0)),
        min_tokens=9,
        eos=(12,),
    )
    assert logits == [1, 1]


@pytest.mark.parametrize(
    ("row", "kw", "expected"),
    [
        ("falling", {"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ("level", {"top_k": 2}, [0.25] * 4),
        ("tied", {"top_k": 2}, [5 / 9, 2 / 9, 2 / 9, 0]),
        ("falling", {"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ("level", {"top_p": 0.6}, [0.25] * 4),
        ("tied", {"top_p": 0.6}, [5 / 9, 2 / 9, 2 / 9, 0]),
        ("falling", {"top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ("level", {"top_p": 0.5}, [0.25] * 4),
        ("tied", {"top_p": 0.5}, [1, 0, 0, 0]),
        ("falling", {"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ("falling", {"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ("falling", {"min_p": 1.0}, [1, 0, 0, 0]),
        ("tied", {"top_p": 1e-9}, [1, 0, 0, 0]),
        ("tied", {"top_k": 1}, [1, 0, 0, 0]),
        ("falling", {"top_k": 4}, [0.4, 0.3, 0.2, 0.1]),
        ("falling", {"top_k": 99}, [0.4, 0.3, 0.2, 0.1]),
        ("falling", {}, [0.4, 0.3, 0.2, 0.1]),
    ],
)
def test_cuts_keep_the_tokens_worked_by_hand_and_all_tied_with_the_last(
    row: str, kw: dict[str, Any], expected: list[float]
) -> None:
    logits = np.log(np.array(ROWS[row], dtype=np.float32))
    z = scale(logits, 1.0)
    kept = np.exp(cut(z, params(**kw)).astype(np.float64))
    assert kept / kept.sum() == pytest.approx(expected, abs=1e-6)
    dense = cut_dense(
        torch.from_numpy(z)[None],
        DenseParams.of_rows([LogitRow(params(**kw), (), ())], torch.device("cpu")),
    )
    assert np.array_equal(dense[0].numpy() > -np.inf, kept > 0)


def test_a_nucleus_wider_than_the_first_sort_is_found() -> None:
    z = scale(np.random.default_rng(0).normal(size=20_000).astype(np.float32) * 0.1, 1.0)
    kept = cut(z, params(top_p=0.9)) > -np.inf
    mass = np.exp(z.astype(np.float64))
    threshold = z[kept].min()
    assert mass[kept].sum() >= 0.9 * mass.sum() * (1 - 2e-6)
    assert mass[z > threshold].sum() < 0.9 * mass.sum()


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 0.01])
def test_a_very_low_temperature_leaves_the_best_token_alone(temperature: float) -> None:
    z = scale(np.array([30.0, 29.0, -40.0], dtype=np.float32), temperature)
    assert z[0] == 0
    assert not np.isnan(z).any()
    assert (z[1:] < -50).all()


@pytest.mark.parametrize("penalty", [1e-38, 1e38])
def test_no_repetition_penalty_takes_a_logit_past_what_can_be_compared(penalty: float) -> None:
    """One req's params must not look like a broken model, which would end its whole group."""
    logits = adjusted(
        [5, 4, -3, -5], prompt=(0, 1, 2, 3), repetition_penalty=penalty, logit_bias=((1, 100.0),)
    )
    assert np.isfinite(logits).all()
    assert np.isfinite(scale(np.array(logits, dtype=np.float32), 1e-5)).all()
    assert min(logits[:2]) > max(logits[2:])


def test_a_repetition_penalty_does_not_hide_a_broken_logit() -> None:
    logits = adjusted([float("inf"), 1, 2], prompt=(0, 1), repetition_penalty=2.0)
    assert logits == [float("inf"), 0.5, 2]
