"""Greedy verification: walk each tree while the target agrees."""

import torch
from torch import Tensor

from paceline.kernels.api import TreeLinks, VerifyResult


def verify_tree_greedy(
    draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
) -> VerifyResult:
    """Walk each tree from its root while the target's token at a node equals a child's.

    Args:
        draft_ids: [bs, num_draft_tokens] int64; column 0 is the root.
        links: the links of the same trees.
        target_ids: [bs, num_draft_tokens] int64, the target's own token after each node.
        max_depth: most draft tokens accepted per req.
    Source: greedy case of arXiv 2211.17192; tree walk of arXiv 2305.09781.
    """
    bs, num_nodes = draft_ids.shape
    predict = [0] * (bs * num_nodes)
    accept_index = [[-1] * (max_depth + 1) for _ in range(bs)]
    accept_length = [0] * bs
    rows = zip(
        draft_ids.tolist(),
        target_ids.tolist(),
        links.retrieve_index.tolist(),
        links.retrieve_next_token.tolist(),
        links.retrieve_next_sibling.tolist(),
        strict=True,
    )
    for b, (draft, target, index, next_token, next_sibling) in enumerate(rows):
        node = 0
        accept_index[b][0] = index[0]
        predict[index[0]] = target[0]
        while accept_length[b] < max_depth:
            child = next_token[node]
            while child != -1 and draft[child] != target[node]:
                child = next_sibling[child]
            if child == -1:
                break
            node = child
            accept_length[b] += 1
            accept_index[b][accept_length[b]] = index[node]
            predict[index[node]] = target[node]
    device = draft_ids.device
    return VerifyResult(
        torch.tensor(predict, dtype=torch.int64, device=device),
        torch.tensor(accept_index, dtype=torch.int64, device=device).view(bs, max_depth + 1),
        torch.tensor(accept_length, dtype=torch.int64, device=device),
    )
