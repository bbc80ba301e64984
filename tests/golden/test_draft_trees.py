"""Hand-checkable trees: what is selected at each step, and the links a verify walks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels.registry import load_kernels
from paceline.worker.spec.selection import Candidates, build_trees, organise, select_top_k_tokens

VECTORS = json.loads(Path(__file__).with_name("draft_trees.json").read_text())["vectors"]


def grow(vector: dict[str, Any], copies: int) -> list[Candidates]:
    """The candidates of a batch of `copies` equal reqs, each step checked on the way."""
    scores = None
    steps = []
    for step, given in enumerate(vector["steps"]):
        selection = select_top_k_tokens(
            step,
            torch.tensor(given["topk_p"] * copies),
            torch.tensor(given["topk_index"] * copies),
            scores,
            vector["topk"],
        )
        for b in range(copies):
            assert selection.input_ids[b].tolist() == given["input_ids"]
            assert selection.parent_lanes[b].tolist() == given["parent_lanes"]
            assert selection.scores[b].tolist() == pytest.approx(given["scores"])
            assert selection.candidates.lane_gids[b].tolist() == given["lane_gids"]
        scores = selection.scores
        steps.append(selection.candidates)
    return steps


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
@pytest.mark.parametrize("copies", [1, 3])
def test_growth_organises_into_the_tree_worked_by_hand(vector: dict[str, Any], copies: int) -> None:
    steps = grow(vector, copies)
    scores = torch.cat([step.scores for step in steps], 1)
    wanted = [vector["num_draft_tokens"]] * copies
    trees = build_trees(steps, wanted, vector["topk"])
    for b, organised in enumerate(organise(steps, wanted)):
        assert scores[b].tolist() == pytest.approx(vector["candidate_scores"])
        assert list(organised.parents) == vector["parents"]
        assert list(organised.selected) == vector["selected"]
        assert list(organised.draft_ids) == vector["draft_ids"]
        assert list(trees[b].token_ids) == vector["draft_ids"]
        assert list(trees[b].parents) == vector["tree_parents"]
        assert list(trees[b].depths()) == vector["depths"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_links_of_the_tree_are_those_worked_by_hand(vector: dict[str, Any]) -> None:
    (tree,) = build_trees(grow(vector, 1), [vector["num_draft_tokens"]], vector["topk"])
    links = load_kernels("reference", "cpu").build_tree_links(torch.tensor([[-1, *tree.parents]]))
    assert links.retrieve_next_token[0].tolist() == vector["next_token"]
    assert links.retrieve_next_sibling[0].tolist() == vector["next_sibling"]
