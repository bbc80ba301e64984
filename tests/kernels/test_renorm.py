"""Distributions cut to their largest values: worked rows, ties, then any rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.renorm import top_k_renorm, top_p_renorm
from tests.kernels.rows import i32

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tree_kernels.json").read_text())
RENORM = GOLDEN["renorm"]


def f32(values: list[Any], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@pytest.mark.parametrize("cut", RENORM["cuts"], ids=lambda cut: str(next(iter(cut.items()))))
def test_worked_cuts(kernels: KernelSet, device: str, cut: dict[str, Any]) -> None:
    probs = f32(RENORM["probs"], device)
    if "top_k" in cut:
        ours = kernels.top_k_renorm(probs, i32([cut["top_k"]] * 3, device))
    else:
        ours = kernels.top_p_renorm(probs, f32([cut["top_p"]] * 3, device))
    torch.testing.assert_close(ours, f32(cut["expected"], device), atol=1e-6, rtol=0.0)


def test_cuts_follow_each_other(kernels: KernelSet, device: str) -> None:
    probs = kernels.top_k_renorm(f32(RENORM["probs"][:1], device), i32([3], device))
    ours = kernels.top_p_renorm(probs, f32([0.7], device))
    expected = f32([[0.571429, 0.428571, 0, 0]], device)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("top_k", [4, 5, 1 << 30])
def test_a_cut_that_takes_all_changes_nothing(kernels: KernelSet, device: str, top_k: int) -> None:
    probs = f32([[0.4, 0.3, 0.2, 0.1], [0.7, 0.3, 0.0, 0.0]], device)
    ours = kernels.top_k_renorm(probs, i32([top_k] * 2, device))
    torch.testing.assert_close(ours, probs, atol=1e-6, rtol=0.0)
    ours = kernels.top_p_renorm(probs, f32([1.0] * 2, device))
    torch.testing.assert_close(ours, probs, atol=1e-6, rtol=0.0)


def test_one_value_is_left_of_a_greedy_row_and_other_rows_keep_theirs(
    kernels: KernelSet, device: str
) -> None:
    probs = f32([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]], device)
    ours = kernels.top_k_renorm(probs, i32([1, 3], device))
    torch.testing.assert_close(ours, f32([[0, 1, 0], [0.1, 0.6, 0.3]], device), atol=1e-6, rtol=0.0)


def test_zeros_stay_zero_where_fewer_values_are_there_than_asked(
    kernels: KernelSet, device: str
) -> None:
    probs = f32([[0.75, 0.0, 0.25, 0.0]], device)
    for ours in (
        kernels.top_k_renorm(probs, i32([3], device)),
        kernels.top_p_renorm(probs, f32([0.999], device)),
    ):
        torch.testing.assert_close(ours, probs, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (3, 37), (2, 5000)])
def test_sets_agree_on_any_rows(
    kernels: KernelSet, device: str, num_rows: int, vocab_size: int
) -> None:
    probs = (torch.randn(num_rows, vocab_size) * 3).softmax(-1)
    top_k = torch.randint(1, vocab_size + 1, (num_rows,), dtype=torch.int32)
    top_p = torch.rand(num_rows) * 0.9 + 0.05
    for ours, expected in (
        (kernels.top_k_renorm(probs.to(device), top_k.to(device)), top_k_renorm(probs, top_k)),
        (kernels.top_p_renorm(probs.to(device), top_p.to(device)), top_p_renorm(probs, top_p)),
    ):
        if kernels.name != "sgl":  # sums in fp32: where top_p falls between small values may differ
            assert torch.equal(ours.cpu() > 0, expected > 0)
        torch.testing.assert_close(ours.cpu(), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.integers(0, 6), min_size=1, max_size=12).filter(any), cut=st.integers(1, 12)
)
def test_what_is_kept_is_what_a_naive_cut_keeps(weights: list[int], cut: int) -> None:
    total = sum(weights)
    probs = torch.tensor([weights]).float() / 64.0  # exact; need not sum to 1
    ranked = sorted(weights, reverse=True)
    least = ranked[min(cut, len(ranked)) - 1]
    kept = [w if w and w >= least else 0 for w in weights]
    ours = top_k_renorm(probs, i32([cut]))[0]
    if cut >= len(weights):
        assert torch.equal(ours, probs[0])
    else:
        torch.testing.assert_close(ours, torch.tensor(kept) / float(sum(kept)))

    wanted = min(cut, total)  # of `total` 64ths
    mass, least = 0, 0
    for weight in ranked:
        mass, least = mass + weight, weight
        if mass >= wanted:
            break
    kept = [w if w and w >= least else 0 for w in weights]
    ours = top_p_renorm(probs, torch.tensor([wanted / 64.0]))[0]
    torch.testing.assert_close(ours, torch.tensor(kept) / float(sum(kept)))


def test_no_rows_are_no_error(kernels: KernelSet, device: str) -> None:
    none = torch.zeros(0, 5, device=device)
    assert kernels.top_k_renorm(none, i32([], device)).shape == (0, 5)
    assert kernels.top_p_renorm(none, torch.zeros(0, device=device)).shape == (0, 5)
