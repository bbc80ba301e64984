"""Trees of chosen candidates: worked ones in each mask mode, then random and broken ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet, TreeMaskMode
from paceline.kernels.reference.build_tree import build_tree
from tests.kernels.rows import i64, tree_cells

GOLDEN = Path(__file__).parents[1] / "golden" / "tree_kernels.json"
VECTORS = json.loads(GOLDEN.read_text())["build_tree"]


def star(num_nodes: int) -> dict[str, Any]:
    """A root and its children."""
    children = [list(range(num_nodes - 1))]
    return {
        "topk": 64,
        "verified_id": [1],
        "parents": [[]],
        "selected": children,
        "draft_ids": children,
        "seq_lens": [0],
    }


def matrix(rows: list[list[int]], device: str) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


def build(
    kernels: KernelSet, device: str, vector: dict[str, Any], mode: TreeMaskMode, **buffers: Any
) -> BuiltTrees:
    return kernels.build_tree(
        i64(vector["verified_id"], device),
        matrix(vector["parents"], device),
        matrix(vector["selected"], device),
        matrix(vector["draft_ids"], device),
        i64(vector["seq_lens"], device),
        vector["topk"],
        mode,
        **buffers,
    )


def wanted_mask(vector: dict[str, Any], mode: TreeMaskMode) -> list[int]:
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        bits: list[int] = vector["bits"]
        return bits
    cells = vector["full" if mode is TreeMaskMode.FULL_MASK else "qlen"].replace(" ", "")
    return [int(cell) for cell in cells]


@pytest.mark.parametrize("mode", TreeMaskMode)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_trees_are_those_worked_by_hand(
    kernels: KernelSet, device: str, vector: dict[str, Any], mode: TreeMaskMode
) -> None:
    trees = build(kernels, device, vector, mode)
    assert trees.draft_ids.tolist() == vector["nodes"]
    assert trees.links.retrieve_index.tolist() == vector["index"]
    assert trees.links.retrieve_next_token.tolist() == vector["next_token"]
    assert trees.links.retrieve_next_sibling.tolist() == vector["next_sibling"]
    assert trees.positions.tolist() == vector["positions"]
    assert trees.tree_mask.tolist() == wanted_mask(vector, mode)
    packed = mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    assert trees.tree_mask.dtype == (torch.uint8 if packed else torch.bool)


@pytest.mark.parametrize("mode", TreeMaskMode)
def test_longer_buffers_keep_what_lies_behind(
    kernels: KernelSet, device: str, mode: TreeMaskMode
) -> None:
    vector = VECTORS[0]
    mask = torch.full((200,), 7, dtype=torch.uint8, device=device)
    positions = torch.full((20,), 99, device=device)
    trees = build(kernels, device, vector, mode, tree_mask=mask, positions=positions)
    wanted = wanted_mask(vector, mode)
    assert trees.tree_mask is mask
    assert trees.positions is positions
    assert mask.tolist() == wanted + [7] * (200 - len(wanted))
    assert positions.tolist() == vector["positions"] + [99] * 8


def test_short_buffers_are_refused(kernels: KernelSet, device: str) -> None:
    short = torch.zeros(71, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match="tree_mask has 71 cells, these trees need 72"):
        build(kernels, device, VECTORS[0], TreeMaskMode.QLEN_ONLY, tree_mask=short)
    with pytest.raises(ValueError, match="these trees need 102"):
        build(
            kernels,
            device,
            VECTORS[0],
            TreeMaskMode.FULL_MASK,
            seq_lens_sum=5,
            tree_mask=short.repeat(2)[:101],
        )


@pytest.mark.parametrize(
    ("num_nodes", "dtype"), [(8, torch.uint8), (9, torch.uint16), (32, torch.uint32)]
)
def test_bits_take_the_least_type_that_holds_them(
    kernels: KernelSet, device: str, num_nodes: int, dtype: torch.dtype
) -> None:
    trees = build(kernels, device, star(num_nodes), TreeMaskMode.QLEN_ONLY_BITPACKING)
    assert trees.tree_mask.dtype == dtype
    assert trees.tree_mask.tolist() == [1, *(1 + 2**i for i in range(1, num_nodes))]


def test_more_nodes_than_bits_are_refused(kernels: KernelSet, device: str) -> None:
    with pytest.raises(ValueError, match="33 draft tokens do not fit in 32 bits"):
        build(kernels, device, star(33), TreeMaskMode.QLEN_ONLY_BITPACKING)


def test_a_node_without_its_parent_sees_the_root_alone(kernels: KernelSet, device: str) -> None:
    # candidates 0, 2 and 3 (on 0), 8 (on candidate 4, which was not chosen), 6 (on 2)
    vector = {
        "topk": 2,
        "verified_id": [7],
        "parents": [[-1, 0, 1, 2, 4]],
        "selected": [[0, 2, 3, 6, 8]],
        "draft_ids": [[1, 2, 3, 4, 5]],
        "seq_lens": [3],
    }
    trees = build(kernels, device, vector, TreeMaskMode.QLEN_ONLY)
    assert trees.links.retrieve_next_token.tolist() == [[1, 2, 4, -1, -1, -1]]
    assert trees.links.retrieve_next_sibling.tolist() == [[-1, -1, 3, -1, -1, -1]]
    assert trees.positions.tolist() == [3, 4, 5, 5, 6, 4]
    assert trees.tree_mask.view(6, 6)[5].tolist() == [True] + [False] * 4 + [True]


def test_roots_alone_and_empty_batches_are_no_error(kernels: KernelSet, device: str) -> None:
    for bs in (0, 2):
        none = torch.zeros(bs, 0, dtype=torch.int64, device=device)
        ids = torch.zeros(bs, dtype=torch.int64, device=device)
        trees = kernels.build_tree(ids, none, none, none, ids, 2, TreeMaskMode.FULL_MASK)
        assert trees.links.retrieve_next_token.tolist() == [[-1]] * bs
        assert trees.tree_mask.tolist() == [True] * bs


@st.composite
def chosen(draw: st.DrawFn) -> tuple[int, int, list[int], list[int]]:
    """(topk, num_steps, parents, selected); any candidates, so parents may be missing."""
    topk, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    parents = [-1, *range(topk)][: topk * (num_steps - 1) + 1]
    for step in range(1, num_steps - 1):
        first = topk + (step - 1) * topk * topk
        lanes = draw(st.permutations(range(first, first + topk * topk)))
        parents += lanes[:topk]
    total = topk + (num_steps - 1) * topk * topk
    selected = draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=20))
    return topk, num_steps, parents, sorted(selected)


@settings(max_examples=60, deadline=None)
@given(tree=chosen())
def test_masks_and_links_are_those_of_a_naive_look_up(
    tree: tuple[int, int, list[int], list[int]],
) -> None:
    topk, _, parents, selected = tree
    n = len(selected) + 1
    node_of = {gid: i + 1 for i, gid in enumerate(selected)}
    wanted = [-1] + [0 if gid < topk else node_of.get(parents[gid // topk], -2) for gid in selected]
    cells = tree_cells([max(parent, 0) if i else -1 for i, parent in enumerate(wanted)])
    rows = matrix([selected], "cpu")
    built = build_tree(
        i64([1]), matrix([parents], "cpu"), rows, rows, i64([4]), topk, TreeMaskMode.FULL_MASK
    )
    mask = built.tree_mask.view(n, n + 4)
    assert mask[:, :4].all()
    assert torch.equal(mask[:, 4:], cells)
    assert built.positions.tolist() == (cells.sum(1) + 3).tolist()
    for node in range(n):
        later = [i for i in range(node + 1, n) if wanted[node] >= 0 and wanted[i] == wanted[node]]
        children = [i for i in range(n) if wanted[i] == node]
        assert int(built.links.retrieve_next_token[0, node]) == min(children, default=-1)
        assert int(built.links.retrieve_next_sibling[0, node]) == min(later, default=-1)


@pytest.mark.parametrize("mode", TreeMaskMode)
@pytest.mark.parametrize(("bs", "topk", "num_steps", "num_nodes"), [(1, 1, 6, 7), (3, 3, 3, 9)])
def test_sets_agree_whatever_was_chosen(
    kernels: KernelSet,
    device: str,
    bs: int,
    topk: int,
    num_steps: int,
    num_nodes: int,
    mode: TreeMaskMode,
) -> None:
    """Also where parents are missing, stand behind their children, or are no candidates at all."""
    total = topk + (num_steps - 1) * topk * topk
    parents = torch.randint(-3, total + 3, (bs, topk * (num_steps - 1) + 1))
    for b in range(bs):
        parents[b, : topk + 1] = torch.arange(-1, topk)
    selected = torch.stack([torch.randperm(total)[: num_nodes - 1].sort()[0] for _ in range(bs)])
    seq_lens = torch.randint(0, 300, (bs,))
    given = (selected[:, 0], parents, selected, selected, seq_lens)
    expected = build_tree(*given, topk, mode)
    ours = kernels.build_tree(*(x.to(device) for x in given), topk, mode)
    assert ours.tree_mask.tolist() == expected.tree_mask.tolist()
    assert ours.positions.tolist() == expected.positions.tolist()
    assert ours.draft_ids.tolist() == expected.draft_ids.tolist()
    for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
        assert getattr(ours.links, name).tolist() == getattr(expected.links, name).tolist()
