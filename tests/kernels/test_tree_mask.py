"""Tree masks as given: their links come back, their bits are packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.build_tree import build_tree_links
from paceline.kernels.reference.tree_mask import segment_packbits
from tests.kernels.rows import i32, i64, indptr, tree_cells

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tree_kernels.json").read_text())


@pytest.mark.parametrize("vector", GOLDEN["build_tree"], ids=lambda vector: vector["name"])
def test_links_and_positions_come_back_from_the_mask(
    kernels: KernelSet, device: str, vector: dict[str, Any]
) -> None:
    cells = [cell == "1" for cell in vector["qlen"].replace(" ", "")]
    links, positions = kernels.reconstruct_indices_from_tree_mask(
        torch.tensor(cells, device=device),
        i64(vector["seq_lens"], device),
        len(vector["nodes"][0]),
    )
    assert positions.tolist() == vector["positions"]
    assert links.retrieve_index.tolist() == vector["index"]
    assert links.retrieve_next_token.tolist() == vector["next_token"]
    assert links.retrieve_next_sibling.tolist() == vector["next_sibling"]


@pytest.mark.parametrize(("bs", "num_nodes"), [(1, 1), (5, 6), (3, 13)])
def test_any_forest_comes_back(kernels: KernelSet, device: str, bs: int, num_nodes: int) -> None:
    """A row that sees itself alone, as padding does, is linked nowhere."""
    parents = torch.tensor(
        [[-1, *(int(torch.randint(-1, i, ())) for i in range(1, num_nodes))] for _ in range(bs)]
    )
    masks = torch.stack([tree_cells(row) for row in parents.tolist()])
    seq_lens = torch.randint(0, 50, (bs,))
    links, positions = kernels.reconstruct_indices_from_tree_mask(
        masks.flatten().to(device), seq_lens.to(device), num_nodes
    )
    expected = build_tree_links(parents)
    assert links.retrieve_next_token.tolist() == expected.retrieve_next_token.tolist()
    assert links.retrieve_next_sibling.tolist() == expected.retrieve_next_sibling.tolist()
    assert links.retrieve_index.tolist() == expected.retrieve_index.tolist()
    depths = masks.sum(-1) - 1
    assert positions.tolist() == (seq_lens[:, None] + depths).flatten().tolist()


def test_segments_are_packed_each_from_a_byte_of_its_own(kernels: KernelSet, device: str) -> None:
    given = GOLDEN["packbits"]
    x = torch.tensor(given["x"], dtype=torch.bool, device=device)
    y = torch.full((5,), 255, dtype=torch.uint8, device=device)
    starts, outs = i32(given["input_indptr"], device), i32(given["output_indptr"], device)
    kernels.segment_packbits(x, starts, outs, y)
    assert y.tolist() == [*given["y"], 255, 255]


@pytest.mark.parametrize("lens", [(0,), (8, 0, 1), (1, 7, 9, 64, 33), (5000, 3)])
def test_sets_agree_on_any_segments(kernels: KernelSet, device: str, lens: tuple[int, ...]) -> None:
    x = torch.rand(sum(lens)) < 0.5
    starts, outs = indptr(lens), indptr([-(-length // 8) for length in lens])
    expected = torch.zeros(int(outs[-1]), dtype=torch.uint8)
    segment_packbits(x, starts, outs, expected)
    bits = [
        sum(int(bit) << i for i, bit in enumerate(piece[first : first + 8].tolist()))
        for piece in x.split(lens)
        for first in range(0, len(piece), 8)
    ]
    assert expected.tolist() == bits
    y = torch.zeros_like(expected).to(device)
    kernels.segment_packbits(x.to(device), starts.to(device), outs.to(device), y)
    assert y.tolist() == bits


def test_no_trees_and_no_segments_are_no_error(kernels: KernelSet, device: str) -> None:
    none = torch.zeros(0, dtype=torch.bool, device=device)
    links, positions = kernels.reconstruct_indices_from_tree_mask(none, i64([], device), 4)
    assert links.retrieve_next_token.shape == (0, 4)
    assert positions.shape == (0,)
    kernels.segment_packbits(none, i32([0], device), i32([0], device), none.byte())
