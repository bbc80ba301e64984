"""Rotary embedding of half-split (NeoX) pairs, in fp32 whatever the dtype of q and k."""

import torch
from torch import Tensor


def apply_rotary(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place and return them.

    Args:
        cos_sin: [max_len, D] fp32, cos half then sin half; [T, D] with positions None.
        positions: [T] int64, or None when row t of `cos_sin` belongs to token t.
    """
    rows = cos_sin if positions is None else cos_sin.index_select(0, positions)  # [T, D]
    num_tokens, head_dim = rows.shape
    cos, sin = rows.view(num_tokens, 2, 1, 1, head_dim // 2).unbind(1)  # [T, 1, 1, D / 2]
    joint = _join(q, k)
    for x in (q, k) if joint is None else (joint,):
        _rotate(x, cos, sin)
    return q, k


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x1, x2 = x1 cos - x2 sin, x2 cos + x1 sin; each product rounded, never fused."""
    num_tokens, num_heads, head_dim = x.shape
    halves = x.view(num_tokens, num_heads, 2, head_dim // 2)
    crossed = halves * sin
    turned = halves * cos
    turned[:, :, 0].sub_(crossed[:, :, 1])
    turned[:, :, 1].add_(crossed[:, :, 0])
    halves.copy_(turned)


def _join(q: Tensor, k: Tensor) -> Tensor | None:
    """q and k as one tensor when k's heads follow q's in memory, so that each op runs once."""
    num_tokens, num_heads, head_dim = q.shape
    if (
        (num_tokens > 1 and q.stride(0) != k.stride(0))
        or q.stride()[1:] != (head_dim, 1)
        or k.stride()[1:] != (head_dim, 1)
        or k.data_ptr() != q.data_ptr() + num_heads * head_dim * q.element_size()
    ):
        return None
    return torch.as_strided(q, (num_tokens, num_heads + k.shape[1], head_dim), q.stride())
