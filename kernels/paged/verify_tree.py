"""Greedy verification: one program walks one tree, so a verify needs no sync."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.api import TreeLinks, VerifyResult


@triton.jit
def _verify_tree_greedy_kernel(
    draft_ids,
    target_ids,
    index,
    next_token,
    next_sibling,
    predict,
    accept_index,
    accept_length,
    num_nodes,
    max_depth,
):
    b = tl.program_id(0).to(tl.int64)
    first = b * num_nodes
    path = accept_index + b * (max_depth + 1)
    node = b * 0
    depth = b * 0
    at = tl.load(index + first)
    target = tl.load(target_ids + first)
    tl.store(path, at)
    tl.store(predict + at, target)
    child = tl.load(next_token + first)
    # Each pass looks at one child; an agreeing one becomes the node, or else its sibling is next.
    while (child >= 0) & (depth < max_depth):
        if tl.load(draft_ids + first + child) == target:
            node = child
            depth += 1
            at = tl.load(index + first + node)
            target = tl.load(target_ids + first + node)
            tl.store(path + depth, at)
            tl.store(predict + at, target)
            child = tl.load(next_token + first + node)
        else:
            child = tl.load(next_sibling + first + child)
    tl.store(accept_length + b, depth)


def verify_tree_greedy(
    draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
) -> VerifyResult:
    """As the reference's `verify_tree_greedy`."""
    bs, num_nodes = draft_ids.shape
    predict = draft_ids.new_zeros(bs * num_nodes)
    accept_index = draft_ids.new_full((bs, max_depth + 1), -1)
    accept_length = draft_ids.new_zeros(bs)
    if bs:
        _verify_tree_greedy_kernel[(bs,)](
            draft_ids.contiguous(),
            target_ids.contiguous(),
            links.retrieve_index,
            links.retrieve_next_token,
            links.retrieve_next_sibling,
            predict,
            accept_index,
            accept_length,
            num_nodes,
            max_depth,
        )
    return VerifyResult(predict, accept_index, accept_length)
