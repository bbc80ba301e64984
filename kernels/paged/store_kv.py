"""Write this step's K and V into their slots: one program per token."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_kv, check_slots


@triton.jit
def _store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    out_cache_loc,
    k_stride,
    v_stride,
    k_cache_stride,
    v_cache_stride,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(out_cache_loc + token)
    offs = tl.arange(0, BLOCK)
    mask = offs < ROW
    k_row = tl.load(k + token * k_stride + offs, mask=mask, other=0.0)
    v_row = tl.load(v + token * v_stride + offs, mask=mask, other=0.0)
    tl.store(k_cache + slot * k_cache_stride + offs, k_row, mask=mask)
    tl.store(v_cache + slot * v_cache_stride + offs, v_row, mask=mask)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """As the reference's `store_kv`."""
    check_kv(k, v, k_cache, v_cache)
    check_slots("out_cache_loc", out_cache_loc)
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    row = num_heads * head_dim
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        out_cache_loc,
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        ROW=row,
        BLOCK=triton.next_power_of_2(row),
    )
