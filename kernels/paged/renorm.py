"""Distributions cut to their largest values, ties kept, and divided by what is left.

The least value kept is found by bisection over the bits of fp32 numbers, which are ordered as the
numbers are: 31 passes over a row find it exactly, without a sort and without scratch.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_dtype

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _renorm_kernel(
    probs, limits, out, vocab_size, row_stride, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64)
    row = probs + n * row_stride
    limit = tl.load(limits + n)
    is_whole = limit >= 1.0 if BY_MASS else limit >= vocab_size
    # The greatest bits `low` such that the values from there up are enough; 1 keeps all but zeros.
    low = tl.program_id(0) * 0 + 1
    high = tl.where(is_whole, low, 0x7F800000)
    while high - low > 1:
        middle = low + (high - low) // 2
        found = (n * 0).to(tl.float64)  # the mass, or the count, of the values from `middle` up
        for first in range(0, vocab_size, BLOCK):
            offs = first + tl.arange(0, BLOCK)
            p = tl.load(row + offs, mask=offs < vocab_size, other=0.0)
            value = p if BY_MASS else p * 0.0 + 1.0
            is_kept = p.to(tl.int32, bitcast=True) >= middle
            found += tl.sum(tl.where(is_kept, value, 0.0).to(tl.float64))
        is_enough = found >= limit.to(tl.float64)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    total = (n * 0).to(tl.float64)
    for first in range(0, vocab_size, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        p = tl.load(row + offs, mask=offs < vocab_size, other=0.0)
        total += tl.sum(tl.where(p.to(tl.int32, bitcast=True) >= low, p, 0.0).to(tl.float64))
    divisor = tl.where(is_whole | (total == 0.0), total * 0.0 + 1.0, total)
    for first in range(0, vocab_size, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < vocab_size
        p = tl.load(row + offs, mask=mask, other=0.0)
        kept = tl.where(p.to(tl.int32, bitcast=True) >= low, p, 0.0)
        tl.store(out + n * vocab_size + offs, (kept.to(tl.float64) / divisor).to(tl.float32), mask)


def top_k_renorm(probs: Tensor, top_k: Tensor) -> Tensor:
    """As the reference's `top_k_renorm`."""
    return _renorm(probs, top_k, by_mass=False)


def top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """As the reference's `top_p_renorm`."""
    check_dtype("top_p", top_p, torch.float32)
    return _renorm(probs, top_p, by_mass=True)


def _renorm(probs: Tensor, limits: Tensor, *, by_mass: bool) -> Tensor:
    check_dtype("probs", probs, torch.float32)
    probs = probs.contiguous()
    out = torch.empty_like(probs)
    if out.numel():
        _renorm_kernel[(len(probs),)](
            probs,
            limits,
            out,
            probs.shape[1],
            probs.stride(0),
            BY_MASS=by_mass,
            BLOCK=min(BLOCK, triton.next_power_of_2(probs.shape[1])),
            num_warps=NUM_WARPS,
        )
    return out
