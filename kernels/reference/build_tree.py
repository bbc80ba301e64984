"""Chosen draft candidates → trees: links for a verify to walk, positions, attention masks."""

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, TreeLinks, TreeMaskMode
from paceline.kernels.tree_buffers import check_mask_mode, make_mask, make_positions

_UNLINKED = -2  # the parent of a node that is linked nowhere


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
    """Node 0 is verified_id, node i the candidate selected[:, i - 1]; its parent is looked up.

    Args:
        verified_id: [bs], the last token emitted.
        parents: [bs, n] int64, candidate g stands on candidate parents[b, g // topk]; entry 0 is
            the root's.
        selected: [bs, num_draft_tokens - 1] int64, distinct candidates, ascending.
        draft_ids: [bs, num_draft_tokens - 1], their tokens.
        seq_lens: [bs], tokens before the root.
        tree_mask, positions: buffers to write to, at least as long as needed.
        seq_lens_sum: their sum; saves a sync where FULL_MASK gets no buffer.
    A node whose parent does not stand before it attends to the prefix, the root and itself and is
    linked nowhere: so no walk is longer than the tree, whatever the scores were.
    """
    bs, num_nodes = len(selected), selected.shape[1] + 1
    check_mask_mode(mask_mode, num_nodes)
    node_parents = _node_parents(parents, selected, topk)
    cells, depths = _cells(node_parents)
    positions = make_positions(positions, seq_lens, num_nodes)
    positions[: bs * num_nodes] = (seq_lens[:, None] + depths).flatten()
    if mask_mode is TreeMaskMode.FULL_MASK and seq_lens_sum is None:
        seq_lens_sum = int(seq_lens.sum())
    tree_mask = make_mask(tree_mask, mask_mode, bs, num_nodes, seq_lens_sum, seq_lens.device)
    packed = _lay_out(cells, seq_lens, mask_mode)
    tree_mask[: len(packed)] = packed.to(tree_mask.dtype)
    nodes = torch.cat((verified_id[:, None].long(), draft_ids), 1)
    return BuiltTrees(nodes, build_tree_links(node_parents), positions, tree_mask)


def build_tree_links(parents: Tensor) -> TreeLinks:
    """parents [bs, num_draft_tokens] int64 -> links; children of one parent in ascending order.

    The root is column 0 with parent -1; -2 marks padding nodes, which are linked nowhere.
    """
    bs, num_nodes = parents.shape
    nodes = torch.arange(num_nodes, device=parents.device)
    is_child = parents[:, None, :] == nodes[:, None]  # [bs, parent, child]
    next_token = first_true(is_child)
    is_sibling = (parents[:, None, :] == parents[:, :, None]) & (parents >= 0)[:, :, None]
    next_sibling = first_true(is_sibling & (nodes > nodes[:, None]))
    index = torch.arange(bs * num_nodes, device=parents.device).view(bs, num_nodes)
    return TreeLinks(index, next_token, next_sibling)


def first_true(mask: Tensor) -> Tensor:
    """The index of the first true cell of each row, -1 for none."""
    return mask.byte().argmax(-1).masked_fill_(~mask.any(-1), -1)


def _node_parents(parents: Tensor, selected: Tensor, topk: int) -> Tensor:
    """The parent node of each node, [bs, num_draft_tokens]; -1 for the root."""
    root = selected.new_full((len(selected), 1), -1)
    if selected.shape[1] == 0:
        return root
    group = selected // topk
    num_groups = parents.shape[1]
    on_root = group == 0
    is_known = (group >= 0) & (group < num_groups)
    parent_gid = torch.full_like(selected, _UNLINKED)
    if num_groups:
        looked_up = parents.long().gather(1, group.clamp(0, num_groups - 1))
        parent_gid = torch.where(is_known, looked_up, parent_gid)
    nodes = torch.arange(selected.shape[1], device=selected.device)
    before = nodes < nodes[:, None]  # [node, candidate parent]
    is_parent = (selected[:, None, :] == parent_gid[:, :, None]) & before & ~on_root[:, :, None]
    found = first_true(is_parent)
    found = torch.where(found >= 0, found + 1, _UNLINKED).masked_fill_(on_root, 0)
    return torch.cat((root, found), 1)


def _cells(node_parents: Tensor) -> tuple[Tensor, Tensor]:
    """([bs, n, n] bool: node i attends to node j; depths [bs, n])."""
    bs, n = node_parents.shape
    cells = torch.zeros(bs, n, n, dtype=torch.bool, device=node_parents.device)
    cells[:, :, 0] = True
    at = torch.arange(n, device=node_parents.device).expand(bs, n)
    for _ in range(n):
        cells.scatter_(2, at.unsqueeze(2), True)
        at = node_parents.gather(1, at).clamp(min=0)
    return cells, cells.sum(-1) - 1


def _lay_out(cells: Tensor, seq_lens: Tensor, mask_mode: TreeMaskMode) -> Tensor:
    """The cells as the mode wants them, flat."""
    n = cells.shape[1]
    if mask_mode is TreeMaskMode.QLEN_ONLY:
        return cells.flatten()
    if mask_mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        weights = 1 << torch.arange(n, device=cells.device)
        return (cells * weights).sum(-1).flatten()
    rows = [
        torch.cat((cells.new_ones(n, seq_len), cells[b]), 1).flatten()
        for b, seq_len in enumerate(seq_lens.tolist())
    ]
    return torch.cat(rows) if rows else cells.flatten()
