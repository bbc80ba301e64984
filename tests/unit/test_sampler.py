"""Tokens from rows of logits: what they depend on, and what they do not."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.kernels.registry import load_kernels
from paceline.worker import dense_sampler
from paceline.worker.dense_sampler import (
    DenseParams,
    choose_dense,
    rank_dense,
    target_probs_dense,
)
from paceline.worker.errors import InternalError
from paceline.worker.sampler import NO_TOKEN, LogitRow, Sampler
from paceline.worker.step import SamplingParams

KERNELS = load_kernels("reference", "cpu")
VOCAB = 300


def row(position: int = 5, **kw: Any) -> LogitRow:
    params = SamplingParams(**({"seed": 7, "max_tokens": 9} | kw))
    return LogitRow(params, list(range(position)), [])


def dense(rows: Sequence[LogitRow]) -> DenseParams:
    return DenseParams.of_rows(rows, torch.device("cpu"))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(KERNELS, VOCAB, eos_token_ids=(2,))


def test_greedy_rows_are_argmax_with_ties_to_the_lowest_id(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 40] = logits[0, 41] = 2.0
    logits[1, 9] = 1.0
    chosen = sampler.choose(logits, [row(temperature=0.0)] * 3)
    assert chosen.tolist() == [40, 9, 0]
    assert chosen.dtype == torch.int64


def test_a_row_chooses_the_same_token_alone_and_in_any_batch(
    sampler: Sampler, logits: torch.Tensor
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "logit_bias": ((3, 50.0),)},
        {"min_p": 0.1, "temperature": 1.5},
        {"seed": 2**64 - 1},
    ]
    rows = [row(10 + i, **kw) for i, kw in enumerate(kinds)]
    together = sampler.choose(logits, rows).tolist()
    assert together[3] == 3
    order = [4, 2, 0, 5, 3, 1]
    shuffled = sampler.choose(logits[order], [rows[i] for i in order]).tolist()
    assert shuffled == [together[i] for i in order]
    alone = [int(sampler.choose(logits[i : i + 1], [rows[i]])) for i in range(len(rows))]
    assert alone == together


def test_the_draw_depends_on_seed_and_position_and_nothing_else(
    sampler: Sampler, logits: torch.Tensor
) -> None:
    same = 0.3 * logits[:1].expand(6, VOCAB)
    split = LogitRow(row().params, [1, 2], [3], (4, 5))
    whole = LogitRow(row().params, [9, 9, 9, 9, 9], [])
    chosen = sampler.choose(same[:2], [split, whole]).tolist()
    assert chosen[0] == chosen[1]
    by_position = [int(sampler.choose(same[:1], [row(i)])) for i in range(30)]
    by_seed = [int(sampler.choose(same[:1], [row(seed=i)])) for i in range(30)]
    assert len(set(by_position)) > 20
    assert len(set(by_seed)) > 20


def test_the_logits_given_are_not_changed(sampler: Sampler, logits: torch.Tensor) -> None:
    before = logits.clone()
    rows = [row(repetition_penalty=1.3, top_k=5, logit_bias=((1, 4.0),), min_tokens=3)] * 6
    sampler.choose(logits, rows)
    assert torch.equal(logits, before)


def test_columns_behind_the_vocabulary_are_never_chosen(sampler: Sampler) -> None:
    logits = torch.zeros(2, VOCAB + 20)
    logits[:, VOCAB:] = 100.0
    chosen = sampler.choose(logits, [row(temperature=0.0), row()])
    assert (chosen < VOCAB).all()


def test_greedy_rows_obey_bias_penalties_and_min_tokens(sampler: Sampler) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 2], logits[:, 4], logits[:, 8] = 3.0, 2.0, 1.0
    rows = [
        row(temperature=0.0, min_tokens=1),
        row(temperature=0.0, logit_bias=((8, 5.0),)),
        LogitRow(
            SamplingParams(seed=1, max_tokens=9, temperature=0.0, frequency_penalty=1.0),
            [],
            [2, 2, 2, 4],
        ),
    ]
    assert sampler.choose(logits, rows).tolist() == [4, 8, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_is_never_chosen(sampler: Sampler, logits: torch.Tensor, temperature: float) -> None:
    holed = logits.clone()
    holed[:, ::2] = float("nan")
    chosen = sampler.choose(holed, [row(i, temperature=temperature) for i in range(6)])
    assert (chosen % 2 == 1).all()
    filled = holed.nan_to_num(nan=-torch.inf)
    same = sampler.choose(filled, [row(i, temperature=temperature) for i in range(6)])
    assert torch.equal(chosen, same)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_without_a_finite_maximum_has_no_token_and_the_others_have_theirs(
    sampler: Sampler, logits: torch.Tensor, value: float, temperature: float
) -> None:
    rows = [row(i, temperature=temperature) for i in range(6)]
    expected = sampler.choose(logits, rows).tolist()
    logits[4] = value
    logits[1, 7] = float("nan")
    rows[2] = row(2, temperature=temperature, logit_bias=((3, 1.0),))
    expected[2] = int(sampler.choose(logits[2:3], rows[2:3]))
    expected[1] = int(sampler.choose(logits[1:2], rows[1:2]))
    expected[4] = NO_TOKEN
    assert sampler.choose(logits, rows).tolist() == expected
    assert sampler.choose(logits[4:5], rows[4:5]).tolist() == [NO_TOKEN]


def test_rows_and_logits_of_different_number_are_an_internal_error(
    sampler: Sampler, logits: torch.Tensor
) -> None:
    with pytest.raises(InternalError, match="6 rows of logits for 5 reqs"):
        sampler.choose(logits, [row()] * 5)


def test_no_rows_choose_nothing(sampler: Sampler) -> None:
    assert sampler.choose(torch.empty(0, VOCAB), []).tolist() == []


def test_stats_tell_the_share_of_the_noise(sampler: Sampler, logits: torch.Tensor) -> None:
    sampler.choose(logits, [row(temperature=0.0)] * 6)
    assert (sampler.stats.num_rows, sampler.stats.num_noisy_rows) == (6, 0)
    assert sampler.stats.noise_s == 0.0
    sampler.choose(logits[:2], [row(), row(temperature=0.0)])
    assert (sampler.stats.num_rows, sampler.stats.num_noisy_rows) == (8, 1)
    assert 0.0 < sampler.stats.noise_s < sampler.stats.choose_s


# ---- children of a draft's nodes


def test_a_drafts_first_child_is_the_token_the_target_would_choose(
    sampler: Sampler, logits: torch.Tensor
) -> None:
    rows = [row(i, temperature=t, top_k=k) for i, t in enumerate((0.0, 0.8)) for k in (0, 7, 50)]
    probs, ids = sampler.top_children(logits, rows, 4)
    assert ids[:, 0].tolist() == sampler.choose(logits, rows).tolist()
    assert (probs[:, :-1] >= probs[:, 1:]).all()
    assert ((probs > 0) & (probs <= 1)).all()
    assert all(len(set(children)) == 4 for children in ids.tolist())


def test_greedy_children_have_softmax_probabilities(sampler: Sampler, logits: torch.Tensor) -> None:
    probs, ids = sampler.top_children(logits, [row(temperature=0.0)] * 6, 3)
    expected = logits.softmax(-1).topk(3)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(probs, expected.values)


def test_siblings_meet_one_row_of_noise(sampler: Sampler, logits: torch.Tensor) -> None:
    """Nodes of equal depth stand at one position: equal logits have equal children."""
    same = logits[:1].expand(2, VOCAB)
    params = row().params
    lanes = [LogitRow(params, [1, 2], [3], (4,)), LogitRow(params, [1, 2], [3], (5,))]
    probs, ids = sampler.top_children(same, lanes, 4)
    assert torch.equal(ids[0], ids[1])
    assert torch.equal(probs[0], probs[1])


def test_children_that_there_are_not_are_marked(sampler: Sampler, logits: torch.Tensor) -> None:
    broken = torch.full((VOCAB,), float("nan"))
    logits = torch.stack([logits[0], logits[1], broken, broken])
    rows = [row(top_k=2), row(min_p=1.0), row(), row(temperature=0.0)]
    probs, ids = sampler.top_children(logits, rows, 4)
    assert (probs > 0).sum(1).tolist() == [2, 1, 0, 0]
    assert (probs[probs <= 0] == -torch.inf).all()
    assert (ids[probs <= 0] == 0).all()


# ---- tensors of an executor


@pytest.mark.parametrize("is_chosen_inside", [True, False])
def test_inference_tensors_are_taken(
    sampler: Sampler, logits: torch.Tensor, is_chosen_inside: bool
) -> None:
    rows = [row(frequency_penalty=1.0, min_tokens=1), row(temperature=0.0)] * 3
    expected = sampler.choose(logits, rows)
    with torch.inference_mode():
        made_inside = logits + 0
    with torch.inference_mode(is_chosen_inside):
        assert torch.equal(sampler.choose(made_inside, rows), expected)
        assert torch.equal(
            sampler.top_children(made_inside, rows, 3)[1], sampler.top_children(logits, rows, 3)[1]
        )


def test_dense_children_are_those_of_the_host(sampler: Sampler, logits: torch.Tensor) -> None:
    """What a GPU ranks; its probabilities sum over the whole vocabulary, so only ids are equal."""
    rows = [row(i, temperature=t, top_k=k) for i, t in enumerate((0.0, 0.8)) for k in (0, 3, 50)]
    logits[2, :7] = -torch.inf
    probs, ids = sampler.top_children(logits, rows, 4)
    dense_probs, dense_ids = rank_dense(KERNELS, logits, dense(rows), 4)
    assert torch.equal(ids, dense_ids)
    assert torch.equal(probs > 0, dense_probs > 0)
    assert (dense_probs[:, :-1] >= dense_probs[:, 1:]).all()
    broken = torch.full((1, VOCAB), -torch.inf)
    assert (rank_dense(KERNELS, broken, dense([row()]), 4)[0] == -torch.inf).all()


def test_a_draft_may_know_fewer_tokens_than_a_tree_has_branches(
    sampler: Sampler, logits: torch.Tensor
) -> None:
    hot, rows = torch.tensor([5, 9, 11]), [row(temperature=0.0), row()]
    few = logits[:2, hot]
    for is_dense in (False, True):
        if is_dense:
            probs, columns = rank_dense(KERNELS, few, dense(rows), 5, token_ids=hot)
        else:
            probs, columns = sampler.top_children(few, rows, 5, hot)
        assert (probs[:, :3] > 0).all()
        assert columns[:, :3].sort().values.tolist() == [[0, 1, 2]] * 2
        assert (probs[:, 3:] == -torch.inf).all()
        assert (columns[:, 3:] == 0).all()


def test_a_batch_cut_in_pieces_gives_the_same(
    logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dense(
        [row(i, temperature=t, top_k=k) for i, t in enumerate((0.0, 0.8)) for k in (0, 9, 3)]
    )
    logits[4] = float("nan")
    whole = choose_dense(KERNELS, logits, rows), *target_probs_dense(logits, rows)
    for num_rows in (1, 4):
        monkeypatch.setattr(dense_sampler, "_MAX_CELLS", num_rows * VOCAB)
        pieces = choose_dense(KERNELS, logits, rows), *target_probs_dense(logits, rows)
        assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    assert choose_dense(KERNELS, logits[:0], dense([])).shape == (0,)
    assert target_probs_dense(logits[:0], dense([]))[0].shape == (0, VOCAB)


def test_distributions_on_the_host_are_those_of_whole_batches(
    sampler: Sampler, logits: torch.Tensor
) -> None:
    rows = [row(i, temperature=t, top_k=k) for i, t in enumerate((0.0, 0.8)) for k in (0, 9, 3)]
    logits[4] = float("nan")
    probs, has_none = sampler.target_probs(logits, rows)
    dense_probs, dense_none = target_probs_dense(logits, dense(rows))
    torch.testing.assert_close(probs, dense_probs)
    assert has_none.tolist() == dense_none.tolist() == [i == 4 for i in range(6)]
    assert probs.sum(-1).tolist() == pytest.approx([float(i != 4) for i in range(6)], abs=1e-5)
