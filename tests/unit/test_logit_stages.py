"""What stands around a req's own parameters: processors before; masks, log-probabilities behind."""

import pytest
import torch
from torch import Tensor

from paceline.worker.errors import InternalError
from paceline.worker.logit_stages import (
    NodeRows,
    ProcessedRows,
    apply_mask,
    apply_processors,
    token_logprobs,
)
from paceline.worker.step import SamplingParams, SamplingRow
from tests.three_ways import Case, trees_of


def test_bits_of_a_mask_allow_tokens() -> None:
    """Vector E: words 12, 16, 0, 32 allow {2, 3}, {4}, none, {5}."""
    mask = torch.tensor([[12], [16], [0], [32], [-1]], dtype=torch.int32)
    masked = apply_mask(torch.zeros(5, 8), mask)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in masked]
    assert allowed == [[2, 3], [4], [], [5], list(range(8))]


def test_every_bit_of_every_word_counts() -> None:
    vocab_size = 70
    for token in (0, 31, 32, 63, 64, 69):
        words = torch.zeros(1, 3, dtype=torch.int64)
        words[0, token // 32] = 1 << (token % 32)
        masked = apply_mask(torch.zeros(1, vocab_size), words.to(torch.int32))
        assert masked.isfinite().nonzero().tolist() == [[0, token]]
    assert apply_mask(masked, None) is masked


def test_nodes_tell_the_draft_tokens_behind_the_root() -> None:
    sampling = SamplingRow(SamplingParams(seed=1, max_tokens=1), [1], [7])
    trees = trees_of([Case(sampling, (7, 10, 20, 11), (-1, 0, 0, 1))])
    cells = trees.tree_mask.view(4, 4) & (torch.arange(4) > 0)
    assert NodeRows(trees.draft_ids[0], cells).path_ids() == [(), (10,), (20,), (10, 11)]
    assert NodeRows.of_root(torch.device("cpu")).path_ids() == [()]


def test_processors_rewrite_the_rows_of_their_req_in_turn_and_no_others() -> None:
    def add_one(logits: Tensor, nodes: NodeRows) -> Tensor:
        return logits + 1

    def double(logits: Tensor, nodes: NodeRows) -> Tensor:
        return logits.mul_(2)

    given = torch.ones(4, 3)
    nodes = NodeRows(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.bool))
    changed = apply_processors(given, [ProcessedRows(1, nodes, (add_one, double))])
    assert changed[:, 0].tolist() == [1, 4, 4, 1]
    assert torch.equal(given, torch.ones(4, 3))
    assert apply_processors(given, []) is given


def test_a_processor_that_changes_the_shape_is_an_internal_error() -> None:
    def cut(logits: Tensor, nodes: NodeRows) -> Tensor:
        return logits[:, :2]

    nodes = NodeRows.of_root(torch.device("cpu"))
    with pytest.raises(InternalError, match=r"made \(1, 2\) of logits \(1, 3\)"):
        apply_processors(torch.ones(1, 3), [ProcessedRows(0, nodes, (cut,))])


def test_log_probabilities_are_those_of_the_tempered_row() -> None:
    logits = torch.randn(3, 9)
    logits[0, 4] = float("nan")
    temperatures = torch.tensor([1.0, 0.5, 2.0])
    told = token_logprobs(logits, temperatures, torch.tensor([1, 2, -1]))
    expected = (logits[1] / 0.5).log_softmax(-1)[2]
    assert told[1] == pytest.approx(float(expected))
    assert told[0].isfinite()
    assert told[2] == -torch.inf
