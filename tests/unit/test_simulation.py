"""Acceptance made up for benchmarks."""

from collections import Counter

import pytest
import torch

from paceline.kernels.api import VerifyResult
from paceline.kernels.registry import load_kernels
from paceline.worker.config import SimulatedMethod, SpecConfig
from paceline.worker.sampler import Sampler
from paceline.worker.spec.simulation import simulated_num_new_tokens
from paceline.worker.step import Phase, ReqStep, RowResult, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.dense_rows import simulate
from paceline.worker.target.verify import decide

NUM_STEPS = 5
DRAWS = 4_000


def lengths(wanted: float, method: SimulatedMethod = "match-expected") -> list[int]:
    spec = SpecConfig("eagle", simulated_accept_length=wanted, simulated_method=method)
    return [simulated_num_new_tokens(spec, step, NUM_STEPS) for step in range(DRAWS)]


@pytest.mark.parametrize("wanted", [1.0, 1.25, 3.0, 4.9, 6.0])
def test_the_two_numbers_around_the_length_asked_have_it_as_their_mean(wanted: float) -> None:
    drawn = lengths(wanted)
    assert set(drawn) <= {int(wanted), int(wanted) + (wanted % 1 > 0)}
    assert sum(drawn) / DRAWS == pytest.approx(wanted, abs=0.03)


def test_lengths_stay_within_what_a_tree_can_give() -> None:
    assert set(lengths(0.2)) == {1}
    assert set(lengths(99.0)) == {NUM_STEPS + 1}
    assert set(lengths(0.5, "multinomial")) >= {1, 2}
    assert min(lengths(1.0, "multinomial")) == 1
    assert max(lengths(6.0, "multinomial")) == NUM_STEPS + 1


def test_multinomial_lengths_are_those_of_a_rounded_normal_variable() -> None:
    counts = Counter(lengths(3.0, "multinomial"))
    # Of deviation 1 around 3: within half of it 0.383, from half to one and a half 0.242 each side.
    for num_tokens, share in {3: 0.383, 2: 0.242, 4: 0.242, 1: 0.067, 5: 0.061}.items():
        assert counts[num_tokens] / DRAWS == pytest.approx(share, abs=0.03)


def test_a_steps_number_alone_decides() -> None:
    assert lengths(2.5) == lengths(2.5)
    assert len(set(lengths(2.5))) == 2


def test_the_first_nodes_are_accepted_whatever_tree_they_form() -> None:
    """First nodes 0 and 6, three steps, two tokens -> [0, 1, -1, -1], [6, 7, -1, -1]."""
    real = VerifyResult(
        torch.tensor([20, 0, 21, 0, 0, 41, 77, 0, 0, 0, 0, 0]),
        torch.tensor([[0, 2, 5, -1], [6, -1, -1, -1]]),
        torch.tensor([2, 0]),
    )
    draft_ids = torch.tensor([[7, 10, 20, 11, 12, 21], [8, 30, 31, 32, 33, 34]])
    made_up = simulate(real, draft_ids, 2)
    assert made_up.accept_index.tolist() == [[0, 1, -1, -1], [6, 7, -1, -1]]
    assert made_up.accept_length.tolist() == [1, 1]
    assert made_up.predict.tolist() == [10, 20, 0, 0, 0, 0, 30, 77, 0, 0, 0, 0]


def test_rows_say_that_they_are_made_up_and_plain_rows_are_not() -> None:
    kernels = load_kernels("reference", "cpu")
    sampling = SamplingRow(SamplingParams(seed=1, max_tokens=9, temperature=0.0), [1], [7])
    rows = (ReqStep(0, Phase.DECODE, 1, (7,)), ReqStep(1, Phase.VERIFY, 1, (7, 3, 4)))
    spec = SpecConfig("eagle", num_steps=2, simulated_accept_length=2.0)
    logits = torch.nn.functional.one_hot(torch.tensor([5, 6, 0, 0]), 10).float()
    decision = decide(
        StepPlan(0, rows), logits, [sampling] * 2, Sampler(kernels, 10, (), spec), kernels
    )
    assert decision.rows == (
        RowResult((5,)),
        RowResult((3, 6), 1, num_proposed=2, is_simulated=True),
    )
    assert decision.paths == ((), (0, 1))
