"""Chosen draft candidates → trees: one program finds one node's parent, ancestors and links.

A node's parent is looked for among the nodes before it only, so a walk to the root is shorter than
the tree whatever the candidates are, and no program reads what another writes.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.api import BuiltTrees, TreeLinks, TreeMaskMode
from paceline.kernels.checks import check_dtype
from paceline.kernels.tree_buffers import check_mask_mode, make_mask, make_positions

BLOCK = 256


@triton.jit
def _parent_of(node, gids, parent_gids, on_root, nodes, num_nodes):
    """The node before `node` that it stands on; num_nodes for none. node >= 1."""
    is_node = nodes == node
    wanted = tl.max(tl.where(is_node, parent_gids, -2))
    is_parent = (gids == wanted) & (nodes >= 1) & (nodes < node)
    found = tl.min(tl.where(is_parent, nodes, num_nodes))
    return tl.where(tl.max(tl.where(is_node & on_root, 1, 0)) > 0, 0, found)


@triton.jit
def _build_tree_kernel(
    parents,
    selected,
    seq_lens,
    lens_before,
    index,
    next_token,
    next_sibling,
    positions,
    tree_mask,
    num_nodes,
    num_groups,
    topk,
    MODE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    flat = b * num_nodes + node
    nodes = tl.arange(0, NODES)
    is_chosen = (nodes >= 1) & (nodes < num_nodes)
    gids = tl.load(selected + b * (num_nodes - 1) + nodes - 1, mask=is_chosen, other=-1)
    groups = gids // topk
    on_root = is_chosen & (gids >= 0) & (groups == 0)
    is_known = is_chosen & (gids >= 0) & (groups >= 1) & (groups < num_groups)
    parent_gids = tl.load(parents + b * num_groups + groups, mask=is_known, other=-2).to(tl.int64)

    # Ancestors, from the node up; a node of no parent ends below the root.
    cells = (nodes == 0) | (nodes == node)
    depth = node * 0
    at = node
    while at > 0:
        depth += 1
        up = _parent_of(at, gids, parent_gids, on_root, nodes, num_nodes)
        at = tl.where(up < num_nodes, up, 0)
        cells = cells | (nodes == at)

    # The first later node on this one, and the next on this one's parent.
    own_gid = tl.max(tl.where(nodes == node, gids, -1))
    own_parent = tl.max(tl.where(nodes == node, parent_gids, -2))
    own_on_root = tl.max(tl.where((nodes == node) & on_root, 1, 0)) > 0
    is_linked = own_on_root
    is_child = on_root
    if node > 0:
        up = _parent_of(node, gids, parent_gids, on_root, nodes, num_nodes)
        is_linked = up < num_nodes
        is_child = is_known & (parent_gids == own_gid)
    is_sibling = tl.where(own_on_root, on_root, is_known & (parent_gids == own_parent))
    is_later = nodes > node
    child = tl.min(tl.where(is_child & is_later, nodes, num_nodes))
    sibling = tl.min(tl.where(is_sibling & is_later & is_linked, nodes, num_nodes))
    tl.store(index + flat, flat)
    tl.store(next_token + flat, tl.where(child < num_nodes, child, -1))
    tl.store(next_sibling + flat, tl.where(sibling < num_nodes, sibling, -1))
    length = tl.load(seq_lens + b).to(tl.int64)
    tl.store(positions + flat, length + depth)

    if MODE == 2:
        bits = tl.sum(tl.where(cells & (nodes < num_nodes), 1, 0).to(tl.int64) << nodes)
        tl.store(tree_mask + flat, bits.to(tree_mask.dtype.element_ty))
    else:
        row = tree_mask + flat * num_nodes
        if MODE == 0:
            row += num_nodes * tl.load(lens_before + b) + node * length
            for first in range(0, length, BLOCK):
                offs = first + tl.arange(0, BLOCK)
                tl.store(row + offs, offs >= 0, mask=offs < length)
            row += length
        tl.store(row + nodes, cells, mask=nodes < num_nodes)


def build_tree(
    verified_id: Tensor,
    parents: Tensor,
    selected: Tensor,
    draft_ids: Tensor,
    seq_lens: Tensor,
    topk: int,
    mask_mode: TreeMaskMode,
    *,
    seq_lens_sum: int | None = None,
    tree_mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> BuiltTrees:
    """As the reference's `build_tree`; a sync only for a new FULL_MASK of unknown length."""
    check_dtype("parents", parents, torch.int64)
    check_dtype("selected", selected, torch.int64)
    bs, num_nodes = len(selected), selected.shape[1] + 1
    check_mask_mode(mask_mode, num_nodes)
    is_full = mask_mode is TreeMaskMode.FULL_MASK
    if is_full and seq_lens_sum is None and tree_mask is None:
        seq_lens_sum = int(seq_lens.sum())
    positions = make_positions(positions, seq_lens, num_nodes)
    tree_mask = make_mask(tree_mask, mask_mode, bs, num_nodes, seq_lens_sum, seq_lens.device)
    nodes = torch.cat((verified_id[:, None].long(), draft_ids), 1)
    links = TreeLinks(torch.empty_like(nodes), torch.empty_like(nodes), torch.empty_like(nodes))
    if bs:
        lens = seq_lens.long()
        _build_tree_kernel[(bs, num_nodes)](
            parents.contiguous(),
            selected.contiguous(),
            seq_lens,
            lens.cumsum(0) - lens if is_full else lens,
            links.retrieve_index,
            links.retrieve_next_token,
            links.retrieve_next_sibling,
            positions,
            tree_mask,
            num_nodes,
            parents.shape[1],
            topk,
            MODE=int(mask_mode),
            NODES=triton.next_power_of_2(num_nodes),
            BLOCK=BLOCK,
        )
    return BuiltTrees(nodes, links, positions, tree_mask)
