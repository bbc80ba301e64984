"""Distributions cut to their largest values, ties kept, and divided by what is left."""

import torch
from torch import Tensor


def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep every value that is at least its row's top_k-th largest.

    Args:
        probs: [n, V] fp32, not negative.
        top_k: [n] int, at least 1; from V on the row stays as it is.
    """
    if probs.numel() == 0:
        return probs.clone()
    vocab_size = probs.shape[1]
    ordered = probs.sort(-1, descending=True).values
    rank = (top_k.long() - 1).clamp(0, vocab_size - 1)
    return _keep(probs, ordered.gather(1, rank[:, None]), top_k >= vocab_size)


def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep the fewest largest values that sum to top_p or more, and all that equal the least.

    Args:
        probs: [n, V] fp32, not negative; all of a row is kept that does not sum to top_p.
        top_p: [n] fp32, above 0; from 1 on the row stays as it is.
    """
    if probs.numel() == 0:
        return probs.clone()
    ordered = probs.sort(-1, descending=True).values
    reached = ordered.double().cumsum(-1) >= top_p[:, None]
    rank = reached.byte().argmax(-1, keepdim=True)
    level = ordered.gather(1, rank).masked_fill_(~reached.any(-1, keepdim=True), 0.0)
    return _keep(probs, level, top_p >= 1.0)


def _keep(probs: Tensor, level: Tensor, is_whole: Tensor) -> Tensor:
    """Rows from `level` [n, 1] up, renormalised; rows of is_whole [n] unchanged."""
    kept = probs.masked_fill((probs < level) | (probs == 0), 0.0).double()
    total = kept.sum(-1, keepdim=True)
    renormed = (kept / total.masked_fill(total == 0, 1.0)).float()
    return torch.where(is_whole[:, None], probs, renormed)
