"""Seeded sampling is one function of seed, position and logits, and it samples rightly."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.kernels.registry import load_kernels
from paceline.worker.config import SpecConfig
from paceline.worker.dense_sampler import DenseParams, choose_dense
from paceline.worker.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    host_gumbel,
    host_noise_bits,
    noise_key,
    top_perturbed,
)
from paceline.worker.sampler import LogitRow, Sampler
from paceline.worker.spec.commit import commit_tokens
from paceline.worker.spec.drafter import DraftContext, Drafter
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Phase, ReqId, ReqStep, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.verify import decide

KERNELS = load_kernels("reference", "cpu")
SEEDS = st.integers(0, 2**64 - 1)


def dense(rows: Sequence[LogitRow]) -> DenseParams:
    return DenseParams.of_rows(rows, torch.device("cpu"))


# ---- few tokens get noise, and the outcome is that of noise for all


@settings(max_examples=300, deadline=None)
@given(
    seed=SEEDS,
    position=st.integers(0, 2**20),
    vocab_size=st.integers(40, 5_000),
    spread=st.sampled_from([0.0, 0.01, 0.3, 1.0, 4.0, 20.0]),
    num_cut=st.integers(0, 30),
    is_tied=st.booleans(),
    k=st.integers(1, 9),
)
def test_noise_for_few_chooses_what_noise_for_all_chooses(
    seed: int,
    position: int,
    vocab_size: int,
    spread: float,
    num_cut: int,
    is_tied: bool,
    k: int,
) -> None:
    rng = np.random.default_rng(seed)
    z = (rng.normal(size=vocab_size) * spread).astype(np.float32)
    if is_tied:
        z = np.round(z)
    z[rng.permutation(vocab_size)[:num_cut]] = -np.inf
    z -= z.max()
    key = noise_key(seed, position)
    ids, sums = top_perturbed(z, key, k)
    all_ids = np.arange(vocab_size)
    full = z + host_gumbel(host_noise_bits(key, all_ids))
    best = np.lexsort((all_ids, -full))[:k]
    assert ids.tolist() == best.tolist()
    assert np.array_equal(sums, full[best])


@pytest.mark.parametrize("noise_of_best", ["least", "greatest"])
def test_the_widest_gap_that_noise_can_close_is_searched(noise_of_best: str) -> None:
    """Two tokens whose gap is just inside, or just outside, what their own noise can close."""
    key = noise_key(3, 4)
    noise = host_gumbel(host_noise_bits(key, np.arange(100_000)))
    low, high = int(noise.argmin()), int(noise.argmax())
    best, rival = (low, high) if noise_of_best == "least" else (high, low)
    for gap in np.float32(noise[rival] - noise[best]) + np.array([-1e-3, 1e-3], np.float32):
        z = np.full(100_000, -np.inf, dtype=np.float32)
        z[best], z[rival] = 0.0, -abs(gap)
        full = z + noise
        assert top_perturbed(z, key, 1)[0][0] == full.argmax()
    assert GUMBEL_MIN <= noise.min() <= noise.max() <= GUMBEL_MAX


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(
        st.tuples(
            SEEDS,
            st.sampled_from([0.3, 0.8, 1.0, 2.0]),
            st.sampled_from([0, 1, 5, 500]),
            st.sampled_from([1.0, 0.95, 0.3]),
            st.sampled_from([0.0, 0.05, 0.5]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_host_and_dense_sampling_choose_the_same_tokens(
    data: list[tuple[int, float, int, float, float]],
) -> None:
    generator = torch.Generator().manual_seed(data[0][0] % 2**32)
    logits = torch.randn(len(data), 2_000, generator=generator) * 2
    rows = [
        LogitRow(
            SamplingParams(
                seed=seed, max_tokens=9, temperature=t, top_k=top_k, top_p=top_p, min_p=min_p
            ),
            range(i),
            (),
        )
        for i, (seed, t, top_k, top_p, min_p) in enumerate(data)
    ]
    host = Sampler(KERNELS, 2_000).choose(logits, rows)
    assert torch.equal(host, choose_dense(KERNELS, logits, dense(rows)))


# ---- the frequencies are those of the softmax


@pytest.mark.parametrize(
    ("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 8)], ids=["plain", "cold", "top_k"]
)
def test_tokens_of_many_seeds_follow_the_softmax(temperature: float, top_k: int) -> None:
    """Chi-square of 60,000 seeded draws from a vocabulary of 32."""
    num_draws, vocab_size = 60_000, 32
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)) * 1.5
    rows = [
        LogitRow(
            SamplingParams(seed=seed, max_tokens=1, temperature=temperature, top_k=top_k),
            range(seed % 7),
            (),
        )
        for seed in range(num_draws)
    ]
    chosen = choose_dense(KERNELS, logits.expand(num_draws, vocab_size), dense(rows))
    expected = (logits.double() / temperature).softmax(0)
    if top_k:
        expected[expected < expected.sort(descending=True).values[top_k - 1]] = 0
        expected /= expected.sum()
    counts = torch.bincount(chosen, minlength=vocab_size).double()
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    wanted = expected[kept] * num_draws
    chi_square = float(((counts[kept] - wanted) ** 2 / wanted).sum())
    # 99.99% of right samplers stay below, by Wilson and Hilferty's approximation.
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """Chi-square of pairs of tokens at positions p and p + 1 of 50,000 seeds."""
    num_draws, vocab_size = 50_000, 4
    logits = torch.tensor([0.0, 0.5, -0.5, 0.2])
    expected = logits.double().softmax(0)
    first, second = (
        choose_dense(
            KERNELS,
            logits.expand(num_draws, vocab_size),
            dense(
                [
                    LogitRow(SamplingParams(seed=seed, max_tokens=1), range(position), ())
                    for seed in range(num_draws)
                ]
            ),
        )
        for position in (10, 11)
    )
    counts = torch.bincount(first * vocab_size + second, minlength=vocab_size**2).double()
    wanted = torch.outer(expected, expected).flatten() * num_draws
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 44.3  # 99.99% at 15 degrees


# ---- speculation changes nothing


class ToyModel:
    """Logits as a fixed random function of the last two tokens."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, vocab_size, vocab_size, generator=generator) * 2

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        size = len(self.table)  # ids beyond it, which a draft may claim, mean something as well
        return self.table[token_ids[-2] % size, token_ids[-1] % size]


VOCAB, EOS, MAX_TOKENS = 12, 2, 24
MODEL = ToyModel(VOCAB, 0)
PROMPT = [5, 6, 7]


def generate(
    params: SamplingParams, trees: list[DraftTree], drafter: Drafter | None = None
) -> tuple[list[int], int]:
    """Decodes with the given drafts in turn, with a drafter, or plainly: (output, num steps)."""
    sampler = Sampler(KERNELS, VOCAB, eos_token_ids=(EOS,))
    output: list[int] = []
    num_steps = 0
    while True:
        text = PROMPT + output
        tree: DraftTree | None = None
        if output and drafter is not None:
            (tree,) = drafter.propose([DraftContext(ReqId("a"), PROMPT, output, params, 9)])
        elif output and trees:
            tree = trees[num_steps % len(trees)]
        tree = tree or DraftTree((), ())
        draft_ids = (text[-1], *tree.token_ids)
        parents = (-1, *tree.parents)
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
            paths.append((*paths[parent], token_id))
        logits = torch.stack([MODEL.logits([*text, *path]) for path in paths])
        if output:
            step = ReqStep(0, Phase.VERIFY, len(text) - 1, draft_ids, parents=parents)
        else:
            step = ReqStep(0, Phase.PREFILL, 0, tuple(PROMPT), num_logits=1)
        decision = decide(
            StepPlan(num_steps, (step,)),
            logits,
            [SamplingRow(params, PROMPT, output)],
            sampler,
            KERNELS,
        )
        result = commit_tokens(
            decision.rows[0].new_ids,
            num_output_before=len(output),
            num_total_before=len(text),
            params=params,
            eos_token_ids=(EOS,),
            max_model_len=100,
        )
        output += result.emitted
        num_steps += 1
        if result.finish_reason is not None:
            return output, num_steps


@st.composite
def draft_trees(draw: st.DrawFn) -> DraftTree:
    """Any tree, its tokens drawn from the vocabulary and a little beyond."""
    token_ids: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(0, i))
        token_id = draw(st.integers(0, VOCAB + 1))
        if (parent, token_id) not in zip(parents, token_ids, strict=True):
            token_ids.append(token_id)
            parents.append(parent)
        else:
            break
    return DraftTree(tuple(token_ids), tuple(parents))


PARAMS = st.builds(
    SamplingParams,
    seed=SEEDS,
    max_tokens=st.integers(1, MAX_TOKENS),
    temperature=st.sampled_from([0.0, 0.5, 0.8, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.sampled_from([(), (9,)]),
    ignore_eos=st.booleans(),
    logit_bias=st.sampled_from([(), ((4, 1.5), (2, -1.0))]),
)


@settings(max_examples=150, deadline=None)
@given(params=PARAMS, trees=st.lists(draft_trees(), min_size=1, max_size=4))
@example(
    params=SamplingParams(seed=1, max_tokens=20, frequency_penalty=0.7, min_tokens=9),
    trees=[DraftTree((1, 2, 3, 4), (0, 0, 1, 1))],
)
def test_whatever_is_drafted_the_output_is_that_of_plain_decoding(
    params: SamplingParams, trees: list[DraftTree]
) -> None:
    plain, num_plain_steps = generate(params, [])
    drafted, num_steps = generate(params, trees)
    assert drafted == plain
    assert num_steps <= num_plain_steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_right_draft_is_accepted_whole(temperature: float) -> None:
    params = SamplingParams(seed=3, max_tokens=21, temperature=temperature, ignore_eos=True)
    plain, _ = generate(params, [])
    trees = [DraftTree((), ())]
    trees += [DraftTree.chain(plain[i + 1 : i + 5]) for i in range(0, 20, 5)]
    assert generate(params, trees) == (plain, 5)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_ngram_drafts_save_steps_and_change_nothing(temperature: float, topk: int) -> None:
    """The toy model of two tokens' memory soon repeats itself, and the drafter notices."""
    params = SamplingParams(seed=3, max_tokens=80, temperature=temperature, ignore_eos=True)
    plain, num_plain_steps = generate(params, [])
    spec = SpecConfig("ngram", num_steps=4, topk=topk, num_draft_tokens=5 if topk == 1 else 9)
    drafted, num_steps = generate(params, [], NgramDrafter(spec))
    assert drafted == plain
    assert num_steps < num_plain_steps
