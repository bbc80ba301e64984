"""Greedy verification: one program walks one tree and writes all that is known of it."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
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
    NODES: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first = b * num_nodes
    nodes = tl.arange(0, NODES)
    depths = tl.arange(0, DEPTHS)
    node = b * 0
    depth = b * 0
    target = tl.load(target_ids + first)
    said = tl.where(nodes == 0, target, 0)
    path = tl.where(depths == 0, tl.load(index + first), -1)
    child = tl.load(next_token + first)
    # Each pass looks at one child; an agreeing one becomes the node, or else its sibling is next.
    while (child >= 0) & (depth < max_depth):
        if tl.load(draft_ids + first + child) == target:
            node = child
            depth += 1
            target = tl.load(target_ids + first + node)
            said = tl.where(nodes == node, target, said)
            path = tl.where(depths == depth, tl.load(index + first + node), path)
            child = tl.load(next_token + first + node)
        else:
            child = tl.load(next_sibling + first + child)
    tl.store(predict + first + nodes, said, mask=nodes < num_nodes)
    path_at = accept_index + b * (max_depth + 1) + depths
    tl.store(path_at, path, mask=depths <= max_depth)
    tl.store(accept_length + b, depth)


def verify_tree_greedy(
    draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
) -> VerifyResult:
    """As the reference's `verify_tree_greedy`."""
    bs, num_nodes = draft_ids.shape
    predict = torch.empty(bs * num_nodes, dtype=torch.int64, device=draft_ids.device)
    accept_index = predict.new_empty(bs, max_depth + 1)
    accept_length = predict.new_empty(bs)
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
            NODES=triton.next_power_of_2(num_nodes),
            DEPTHS=triton.next_power_of_2(max_depth + 1),
        )
    return VerifyResult(predict, accept_index, accept_length)
