"""The rule `rejection`: tokens are distributed as the target's, and a small bias would be seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet, TreeLinks, VerifyResult
from paceline.kernels.reference.kernel_set import ReferenceKernels
from paceline.worker.config import SpecConfig
from paceline.worker.step import SamplingParams, SamplingRow
from paceline.worker.target.device_rows import DeviceSampler, Verdict
from tests.three_ways import REFERENCE, Case, trees_of, verify

CPU = torch.device("cpu")
VOCAB = 32
REJECTION = SpecConfig(rule="rejection")
NUM_WALKS, CHUNK = 200_000, 25_000
PARAMS = SamplingParams(seed=11, max_tokens=9, temperature=0.9, top_k=20)
# Three guesses behind the root, and two more behind the first of them.
DRAFT_IDS, PARENTS = (0, 3, 7, 30, 5, 3), (-1, 0, 0, 0, 1, 1)
LOGITS = torch.randn(len(PARENTS), VOCAB, generator=torch.Generator().manual_seed(5))
LOGITS[0, [3, 7, 30]], LOGITS[1, [5, 3]] = 2.5, 2.0  # good guesses, and none is all but sure


def expected(node: int) -> Tensor:
    """The distribution behind a node, worked out apart: top_k, then softmax, in fp64."""
    logits = LOGITS[node].double() / PARAMS.temperature
    kept = logits >= logits.sort(descending=True).values[PARAMS.top_k - 1]
    return logits.masked_fill(~kept, -torch.inf).softmax(0)


def walks(num_walks: int, spec: SpecConfig = REJECTION, kernels: KernelSet = REFERENCE) -> Tensor:
    """Tokens behind root and first guess of many walks, [n, 2]; -1 where there is none."""
    n = len(PARENTS)
    sampler = DeviceSampler(kernels, VOCAB, (), 2, CPU, spec, is_dense=True)
    sampling = SamplingRow(PARAMS, [1], [0])
    sampler.open_rows([1], [sampling])
    one = trees_of([Case(sampling, DRAFT_IDS, PARENTS)])
    depths = one.positions - one.positions[0]
    index = torch.arange(CHUNK * n).view(CHUNK, n)
    links = TreeLinks(
        index,
        one.links.retrieve_next_token.expand(CHUNK, n),
        one.links.retrieve_next_sibling.expand(CHUNK, n),
    )
    tokens = []
    for start in range(0, num_walks, CHUNK):
        # One req at many places of its text, too far apart for two trees to share a position.
        seq_lens = (start + torch.arange(CHUNK)) * 4 + 1
        trees = BuiltTrees(
            one.draft_ids.expand(CHUNK, n).contiguous(),
            links,
            (seq_lens[:, None] + depths).flatten(),
            one.tree_mask.repeat(CHUNK),
        )
        verdict = sampler.verify(
            LOGITS.repeat(CHUNK, 1), trees, torch.ones(CHUNK).long(), [1] * CHUNK, seq_lens, 2
        )
        tokens.append(first_two(verdict))
    return torch.cat(tokens)


def first_two(verdict: Verdict) -> Tensor:
    at = verdict.accept_index[:, :2]
    return verdict.predict[at.clamp(min=0)].masked_fill(at < 0, -1)


def chi_square(tokens: Tensor, probs: Tensor) -> float:
    """In deviations above what a right sampler has, by Wilson and Hilferty's approximation."""
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    if bool((counts[probs == 0] > 0).any()):
        return float("inf")
    wanted = (probs * len(tokens))[probs > 0]
    freedom = len(wanted) - 1
    ratio = float(((counts[probs > 0] - wanted) ** 2 / wanted).sum()) / freedom
    spread = 2 / (9 * freedom)
    return float((ratio ** (1 / 3) - (1 - spread)) / spread**0.5)


def worst(tokens: Tensor) -> float:
    """Of the first token, and of the second behind the first guess, which has node 1."""
    behind = tokens[tokens[:, 0] == DRAFT_IDS[1], 1]
    assert (behind >= 0).all()
    return max(chi_square(tokens[:, 0], expected(0)), chi_square(behind, expected(1)))


def test_tokens_follow_the_targets_distribution() -> None:
    """Chi-square of 200 000 walks, and of the second token where the first was accepted."""
    tokens = walks(NUM_WALKS)
    assert worst(tokens) < 3.7
    # Behind the other guesses, which have no children, the second token follows their own rows.
    for node in (2, 3):
        behind = tokens[tokens[:, 0] == DRAFT_IDS[node], 1]
        assert chi_square(behind, expected(node)) < 3.7


def test_plain_tokens_follow_the_targets_distribution() -> None:
    sampler = DeviceSampler(REFERENCE, VOCAB, (), 2, CPU, REJECTION, is_dense=True)
    sampler.open_rows([1], [SamplingRow(PARAMS, [1], [0])])
    rows = torch.ones(NUM_WALKS).long()
    logits = LOGITS[:1].expand(NUM_WALKS, VOCAB)
    drawn = sampler.draw(logits, rows, [1] * NUM_WALKS, 2 + torch.arange(NUM_WALKS))
    assert chi_square(drawn, expected(0)) < 3.7
    pairs = drawn.view(-1, 2)
    behind = pairs[pairs[:, 0] == drawn.mode().values, 1]
    assert chi_square(behind, expected(0)) < 3.7


class Planted(ReferenceKernels):
    """The reference with one fault in front of it."""

    def __init__(self, fault: Callable[[Any], None]) -> None:
        self._fault = fault

    # The reference's is a static method; an instance's own takes its place.
    def tree_speculative_sampling_target_only(  # type: ignore[override]
        self,
        draft_ids: Tensor,
        links: TreeLinks,
        target_probs: Tensor,
        coins: Tensor,
        final_coins: Tensor,
        max_depth: int,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
    ) -> VerifyResult:
        given = {"probs": target_probs, "coins": coins, "final_coins": final_coins}
        self._fault(given)
        return REFERENCE.tree_speculative_sampling_target_only(
            draft_ids,
            links,
            given["probs"],
            given["coins"],
            given["final_coins"],
            max_depth,
            threshold_single,
            threshold_acc,
        )


def more_of_one_token(given: dict[str, Tensor]) -> None:
    given["probs"] = given["probs"].clone()
    given["probs"][:, :, DRAFT_IDS[2]] *= 1.08


def one_coin_for_both(given: dict[str, Tensor]) -> None:
    given["final_coins"] = given["coins"][:, 0].contiguous()


def coins_that_lean(given: dict[str, Tensor]) -> None:
    given["coins"] = given["coins"] ** 1.04


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (SpecConfig(rule="rejection", threshold_acc=0.95), None),
        (SpecConfig(rule="rejection", threshold_single=float(expected(0)[3]) - 1e-3), None),
        (REJECTION, more_of_one_token),
        (REJECTION, one_coin_for_both),
        (REJECTION, coins_that_lean),
    ],
    ids=["threshold_acc", "threshold_single", "distribution", "shared coin", "leaning coin"],
)
def test_a_small_bias_would_be_noticed(
    spec: SpecConfig, fault: Callable[[Any], None] | None
) -> None:
    kernels = REFERENCE if fault is None else Planted(fault)
    assert worst(walks(NUM_WALKS // 2, spec, kernels)) > 6.0


# ---- one outcome, however it is executed


@st.composite
def cases(draw: st.DrawFn) -> list[Case]:
    bs, n = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    ids = st.integers(0, 13)
    drawn = []
    for _ in range(bs):
        params = SamplingParams(
            seed=draw(st.integers(0, 2**64 - 1)),
            max_tokens=9,
            temperature=draw(st.sampled_from([0.0, 0.6, 1.0])),
            top_k=draw(st.sampled_from([0, 6])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
        )
        output = draw(st.lists(ids, min_size=1, max_size=4))
        parents = [-1, *(draw(st.integers(0, i - 1)) for i in range(1, n))]
        # Siblings may hold one token twice, which must not be tried twice.
        drawn.append(Case(SamplingRow(params, [1], output), [draw(ids) for _ in range(n)], parents))
    return drawn


# Rounding differs between the ways, and a coin between two roundings would part them: seldom, and
# with fixed examples never.
@settings(max_examples=150, deadline=None, derandomize=True)
@given(batch=cases(), seed=st.integers(0, 1_000))
def test_the_same_coins_fall_whichever_way_trees_are_verified(batch: list[Case], seed: int) -> None:
    num_rows = len(batch) * len(batch[0].draft_ids)
    logits = torch.randn(num_rows, 12, generator=torch.Generator().manual_seed(seed)) * 2
    if seed % 5 == 0:
        logits[seed % num_rows] = float("nan")
    for spec in (REJECTION, SpecConfig(rule="rejection", threshold_single=0.3, threshold_acc=0.8)):
        by_plan = verify("plan", batch, logits, vocab_size=12, spec=spec)
        assert by_plan == verify("host rows", batch, logits, vocab_size=12, spec=spec)
        assert by_plan == verify("dense rows", batch, logits, vocab_size=12, spec=spec)
        assert by_plan == [
            verify(
                "plan",
                [case],
                logits.view(len(batch), -1, 12)[b],
                vocab_size=12,
                spec=spec,
            )[0]
            for b, case in enumerate(batch)
        ]


@pytest.mark.parametrize("way", ["plan", "dense rows"])
def test_a_token_drafted_twice_is_tried_once(way: str) -> None:
    """Two siblings hold token 4 of probability 0.4, which is no reason to emit it in 4 of 5."""
    probs = torch.full((3, VOCAB), 0.6 / (VOCAB - 1))
    probs[:, 4] = 0.4
    batch = [
        Case(SamplingRow(SamplingParams(seed, 9), [1], [0]), (0, 4, 4), (-1, 0, 0))
        for seed in range(2_000)
    ]
    outcomes = verify(way, batch, probs.log().repeat(2_000, 1), vocab_size=VOCAB, spec=REJECTION)
    assert abs(sum(outcome.new_ids[0] == 4 for outcome in outcomes) / 2_000 - 0.4) < 0.05
