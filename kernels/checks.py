"""Shape, stride and dtype checks for ops that address memory themselves.

They read no device memory, so they cost no sync. Torch's own ops check for themselves.
"""

import struct

import torch
from torch import Tensor


def check_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """K and V of a step, and the caches they go to.

    Raises: ValueError: a shape disagrees, or a head is not contiguous.
    """
    if k.shape != v.shape or k_cache.shape != v_cache.shape or k.shape[1:] != k_cache.shape[1:]:
        raise ValueError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be [T, Hkv, D] of caches "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    check_heads("k", k)
    check_heads("v", v)
    check_heads("k_cache", k_cache)
    check_heads("v_cache", v_cache)


def check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises: ValueError: q and the caches are not [.., heads, D] alike, or heads do not group."""
    if q.ndim != 3 or k_cache.shape != v_cache.shape or q.shape[-1] != k_cache.shape[-1]:
        raise ValueError(
            f"q {tuple(q.shape)} must be [T, Hq, D] with D of the caches "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads cannot share {k_cache.shape[1]} KV heads evenly"
        )


def check_heads(name: str, x: Tensor) -> None:
    """Raises: ValueError: [.., heads, D] whose last two dimensions are not contiguous."""
    if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:
        raise ValueError(f"{name} has strides {x.stride()}; its last two dimensions must be dense")


def check_dtype(name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raises: ValueError: another dtype."""
    if x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype}, must be {dtype}")


def check_slots(name: str, slots: Tensor) -> None:
    """Raises: ValueError: not int64, or not dense: a view of one column has strides."""
    check_dtype(name, slots, torch.int64)
    if not slots.is_contiguous():
        raise ValueError(f"{name} {tuple(slots.shape)} has strides {slots.stride()}; must be dense")


def check_thresholds(single: float, acc: float) -> tuple[float, float]:
    """Both as the fp32 numbers that kernels take, `acc` no less than 1e-9.

    Raises: ValueError: one is outside [0, 1].
    """
    for name, value in (("threshold_single", single), ("threshold_acc", acc)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}, must be in [0, 1]")
    rounded: tuple[float, float] = struct.unpack("2f", struct.pack("2f", single, max(acc, 1e-9)))
    return rounded
