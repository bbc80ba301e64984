"""Verification by chance: walk each tree so that the tokens are distributed as the target's."""

import torch
from torch import Tensor

from paceline.kernels.api import TreeLinks, VerifyResult
from paceline.kernels.checks import check_thresholds


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
    """Walk each tree; at a node, its coin decides which child to accept, if any.

    Args:
        draft_ids: [bs, num_draft_tokens] int64; children of one node are distinct tokens. An id
            outside the vocabulary is never accepted.
        links: the links of the same trees.
        target_probs: [bs, num_draft_tokens, V] fp32, the target's distribution after each node.
        coins: [bs, num_draft_tokens] fp32 in [0, 1), one for the children of each node.
        final_coins: [bs] fp32 in [0, 1), for the token after the path.
        max_depth: most draft tokens accepted per req.
        threshold_single: accept any child of at least this probability; 1 for an exact sampler.
        threshold_acc: divides what a coin is compared with; 1 for an exact sampler.
    Returns: a path's last token is drawn from what the children refused at its end have left.
    Source: multi-branch rejection of arXiv 2305.09781, with a draft that proposes for certain.
    """
    single, acc_factor = check_thresholds(threshold_single, threshold_acc)
    bs, num_nodes = draft_ids.shape
    vocab_size = target_probs.shape[2]
    device = draft_ids.device
    rows = torch.arange(bs, device=device)
    nodes = torch.arange(num_nodes, device=device)
    node = torch.zeros(bs, dtype=torch.int64, device=device)
    depth = torch.zeros_like(node)
    child = links.retrieve_next_token[:, 0].clone()
    acc = torch.zeros(bs, dtype=torch.float64, device=device)
    tried = torch.zeros(bs, num_nodes, dtype=torch.bool, device=device)  # children of `node`
    predict = torch.zeros(bs * num_nodes, dtype=torch.int64, device=device)
    accept_index = torch.full((bs, max_depth + 1), -1, dtype=torch.int64, device=device)
    accept_index[:, 0] = links.retrieve_index[:, 0]

    for _ in range(num_nodes - 1):  # a pass looks at one child of each req
        is_walking = (child >= 0) & (depth < max_depth)
        at = child.clamp(min=0)
        token = draft_ids[rows, at]
        is_known = is_walking & (token >= 0) & (token < vocab_size)
        q = target_probs[rows, node, token.clamp(0, vocab_size - 1)].masked_fill(~is_known, 0.0)
        acc += q
        wanted = (coins[rows, node].double() * acc_factor < acc) | (q >= single)
        accepted = (q > 0) & wanted
        tried |= is_walking[:, None] & (nodes == at[:, None])

        predict[links.retrieve_index[rows, node][accepted]] = token[accepted]
        depth += accepted
        accept_index[rows[accepted], depth[accepted]] = links.retrieve_index[rows, at][accepted]
        node = torch.where(accepted, at, node)
        acc.masked_fill_(accepted, 0.0)
        tried &= ~accepted[:, None]
        sibling = torch.where(is_walking, links.retrieve_next_sibling[rows, at], child)
        child = torch.where(accepted, links.retrieve_next_token[rows, at], sibling)

    final = _draw(target_probs[rows, node], draft_ids, tried, final_coins)
    predict[links.retrieve_index[rows, node]] = final
    return VerifyResult(predict, accept_index, depth)


def _draw(q: Tensor, draft_ids: Tensor, tried: Tensor, coins: Tensor) -> Tensor:
    """One token of each row of q [bs, V], but none that was tried and refused.

    Where nothing else is left of q, which rounding can bring about, its last token of all.
    """
    vocab_size = q.shape[1]
    is_refused = torch.zeros_like(q, dtype=torch.int32)
    is_token = tried & (draft_ids >= 0) & (draft_ids < vocab_size)
    is_refused.scatter_add_(1, draft_ids.clamp(0, vocab_size - 1), is_token.int())
    left = torch.where((is_refused > 0) | (q <= 0), 0.0, q.double())
    sums = left.cumsum(-1)
    is_hit = (left > 0) & (sums > coins.double()[:, None] * sums[:, -1:])
    first_hit = is_hit.byte().argmax(-1)
    last = torch.where((left > 0).any(-1), _last_true(left > 0), _last_true(q > 0))
    return torch.where(is_hit.any(-1), first_hit, last)


def _last_true(mask: Tensor) -> Tensor:
    """The index of the last true cell of each row; the last of all where none is true."""
    return mask.shape[-1] - 1 - mask.flip(-1).byte().argmax(-1) * mask.any(-1)
