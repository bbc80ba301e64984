"""Verification by chance: one program walks one tree and draws the token after its path.

What remains of a distribution once children were refused is read again from the distribution and
the links, block by block, so there is no scratch of the distributions' size. Sums are in fp64, so
that the order of adding, which differs between sets, decides nothing that fp32 could tell apart.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.api import TreeLinks, VerifyResult
from paceline.kernels.checks import check_dtype, check_thresholds

BLOCK = 2048
NUM_WARPS = 8


@triton.jit
def _without(p, offs, child, draft_ids, next_sibling):
    """A block of a distribution without the tokens of `child` and its later siblings."""
    while child >= 0:
        p = tl.where(offs == tl.load(draft_ids + child), 0.0, p)
        child = tl.load(next_sibling + child)
    return p


@triton.jit
def _tree_sampling_kernel(
    draft_ids,
    index,
    next_token,
    next_sibling,
    target_probs,
    coins,
    final_coins,
    predict,
    accept_index,
    accept_length,
    num_nodes,
    vocab_size,
    max_depth,
    threshold_single,
    threshold_acc,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    first = b * num_nodes
    path = accept_index + b * (max_depth + 1)
    node = b * 0
    depth = b * 0
    at = tl.load(index + first)
    tl.store(path, at)
    child = tl.load(next_token + first)
    coin = tl.load(coins + first).to(tl.float64) * threshold_acc
    acc = coin * 0
    # Each pass looks at one child; once accepted it becomes the node, or else its sibling is next.
    while (child >= 0) & (depth < max_depth):
        token = tl.load(draft_ids + first + child)
        is_known = (token >= 0) & (token < vocab_size)
        here = target_probs + (first + node) * vocab_size
        q = tl.load(here + token, mask=is_known, other=0.0)
        acc += q.to(tl.float64)
        if (q > 0) & ((coin < acc) | (q >= threshold_single)):
            tl.store(predict + at, token)
            node = child
            depth += 1
            at = tl.load(index + first + node)
            tl.store(path + depth, at)
            child = tl.load(next_token + first + node)
            coin = tl.load(coins + first + node).to(tl.float64) * threshold_acc
            acc = coin * 0
        else:
            child = tl.load(next_sibling + first + child)
    tl.store(accept_length + b, depth)

    # Short of max_depth the walk ended because each child of the node was refused.
    refused = tl.load(next_token + first + node)
    refused = tl.where(depth < max_depth, refused, -1)
    row = target_probs + (first + node) * vocab_size
    total = acc * 0
    for start in range(0, vocab_size, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        p = tl.load(row + offs, mask=offs < vocab_size, other=0.0)
        p = _without(p, offs, refused, draft_ids + first, next_sibling + first)
        total += tl.sum(tl.where(p > 0, p, 0.0).to(tl.float64))
    wanted = tl.load(final_coins + b).to(tl.float64) * total
    before = acc * 0
    drawn = node * 0 + vocab_size
    last_left = node * 0 - 1
    last_of_all = node * 0 - 1
    start = node * 0
    while (start < vocab_size) & (drawn == vocab_size):
        offs = start + tl.arange(0, BLOCK)
        p = tl.load(row + offs, mask=offs < vocab_size, other=0.0)
        last_of_all = tl.maximum(last_of_all, tl.max(tl.where(p > 0, offs, -1)))
        p = _without(p, offs, refused, draft_ids + first, next_sibling + first)
        left = tl.where(p > 0, p, 0.0).to(tl.float64)
        last_left = tl.maximum(last_left, tl.max(tl.where(p > 0, offs, -1)))
        is_hit = (p > 0) & (before + tl.cumsum(left, 0) > wanted)
        drawn = tl.min(tl.where(is_hit, offs, vocab_size))
        before += tl.sum(left)
        start += BLOCK
    last_of_all = tl.where(last_of_all < 0, vocab_size - 1, last_of_all)
    last = tl.where(last_left < 0, last_of_all, last_left)
    tl.store(predict + at, tl.where(drawn < vocab_size, drawn, last))


def tree_speculative_sampling_target_only(
    draft_ids: Tensor,
    links: TreeLinks,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> VerifyResult:
    """As the reference's `tree_speculative_sampling_target_only`."""
    single, acc_factor = check_thresholds(threshold_single, threshold_acc)
    check_dtype("target_probs", target_probs, torch.float32)
    check_dtype("coins", coins, torch.float32)
    bs, num_nodes = draft_ids.shape
    vocab_size = target_probs.shape[2]
    predict = draft_ids.new_zeros(bs * num_nodes)
    accept_index = draft_ids.new_full((bs, max_depth + 1), -1)
    accept_length = draft_ids.new_zeros(bs)
    if bs:
        _tree_sampling_kernel[(bs,)](
            draft_ids.contiguous(),
            links.retrieve_index,
            links.retrieve_next_token,
            links.retrieve_next_sibling,
            target_probs.contiguous(),
            coins.contiguous(),
            final_coins.contiguous(),
            predict,
            accept_index,
            accept_length,
            num_nodes,
            vocab_size,
            max_depth,
            single,
            acc_factor,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=NUM_WARPS,
        )
    return VerifyResult(predict, accept_index, accept_length)
