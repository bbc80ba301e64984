"""Tree masks as given: their links and positions, and their bits packed."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.api import TreeLinks
from paceline.kernels.checks import check_dtype

BLOCK_BYTES = 128
# Programs that share one segment; a mask of 64 nodes over 4096 tokens is then 32 blocks each.
PROGRAMS_PER_SEGMENT = 8


@triton.jit
def _parent_in(cells, row, nodes, num_nodes):
    """The last node before `row` that it attends to, -1 for none."""
    seen = tl.load(cells + row * num_nodes + nodes, mask=nodes < num_nodes, other=0) != 0
    return tl.max(tl.where(seen & (nodes < row), nodes, -1))


@triton.jit
def _reconstruct_kernel(
    tree_mask,
    seq_lens,
    index,
    next_token,
    next_sibling,
    positions,
    num_nodes,
    NODES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    flat = b * num_nodes + node
    nodes = tl.arange(0, NODES)
    is_node = nodes < num_nodes
    cells = tree_mask + b * num_nodes * num_nodes
    seen = tl.load(cells + node * num_nodes + nodes, mask=is_node, other=0) != 0
    depth = tl.sum(tl.where(seen & (nodes < node), 1, 0))
    seen_by = tl.load(cells + nodes * num_nodes + node, mask=is_node, other=0) != 0
    child = tl.min(tl.where(seen_by & (nodes > node), nodes, num_nodes))

    parent = _parent_in(cells, node, nodes, num_nodes)
    row = tl.where(parent >= 0, node + 1, num_nodes)
    sibling = node * 0 - 1
    while row < num_nodes:
        is_sibling = _parent_in(cells, row, nodes, num_nodes) == parent
        sibling = tl.where(is_sibling, row, sibling)
        row = tl.where(is_sibling, num_nodes, row + 1)

    tl.store(index + flat, flat)
    tl.store(next_token + flat, tl.where(child < num_nodes, child, -1))
    tl.store(next_sibling + flat, sibling)
    tl.store(positions + flat, tl.load(seq_lens + b).to(tl.int64) + depth)


@triton.jit
def _packbits_kernel(x, input_indptr, output_indptr, y, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    start = tl.load(input_indptr + b).to(tl.int64)
    length = tl.load(input_indptr + b + 1).to(tl.int64) - start
    out = y + tl.load(output_indptr + b).to(tl.int64)
    num_bytes = (length + 7) // 8
    bit = tl.arange(0, 8)
    for first in range(tl.program_id(1) * BLOCK, num_bytes, tl.num_programs(1) * BLOCK):
        byte = first + tl.arange(0, BLOCK)
        offs = byte[:, None] * 8 + bit[None, :]
        set_bits = tl.load(x + start + offs, mask=offs < length, other=0) != 0
        packed = tl.sum(set_bits.to(tl.int32) << bit[None, :], axis=1)
        tl.store(out + byte, packed.to(tl.uint8), mask=byte < num_bytes)


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int
) -> tuple[TreeLinks, Tensor]:
    """As the reference's `reconstruct_indices_from_tree_mask`."""
    bs = len(seq_lens)
    if len(tree_mask) != bs * num_draft_tokens * num_draft_tokens:
        raise ValueError(
            f"tree_mask has {len(tree_mask)} cells, {bs} trees of {num_draft_tokens} nodes have "
            f"{bs * num_draft_tokens * num_draft_tokens}"
        )
    index = torch.empty(bs, num_draft_tokens, dtype=torch.int64, device=tree_mask.device)
    links = TreeLinks(index, torch.empty_like(index), torch.empty_like(index))
    positions = torch.empty(bs * num_draft_tokens, dtype=torch.int64, device=tree_mask.device)
    if index.numel():
        _reconstruct_kernel[(bs, num_draft_tokens)](
            tree_mask,
            seq_lens,
            links.retrieve_index,
            links.retrieve_next_token,
            links.retrieve_next_sibling,
            positions,
            num_draft_tokens,
            NODES=triton.next_power_of_2(num_draft_tokens),
        )
    return links, positions


def segment_packbits(x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor) -> None:
    """As the reference's `segment_packbits`."""
    check_dtype("x", x, torch.bool)
    check_dtype("y", y, torch.uint8)
    bs = len(input_indptr) - 1
    if bs:
        _packbits_kernel[(bs, PROGRAMS_PER_SEGMENT)](
            x, input_indptr, output_indptr, y, BLOCK=BLOCK_BYTES
        )
