"""Copy KV from slot to slot in every cache: one launch gathers all of it, the next scatters it.

A launch sees every cache through a table of addresses, so the cost does not grow with the layers,
and the buffer between the two makes overlapping sources and targets safe for any count.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_heads, check_slots


@triton.jit
def _copy_rows_kernel(
    table,
    buffer,
    slots,
    num_rows,
    cache_stride,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GATHER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cache_id = tl.program_id(1).to(tl.int64)
    cache = tl.load(table + cache_id).to(tl.pointer_type(buffer.dtype.element_ty))
    offs = tl.arange(0, BLOCK)
    mask = offs < ROW
    at_cache = cache + tl.load(slots + row) * cache_stride + offs
    at_buffer = buffer + (cache_id * num_rows + row) * ROW + offs
    if IS_GATHER:
        tl.store(at_buffer, tl.load(at_cache, mask=mask, other=0.0), mask=mask)
    else:
        tl.store(at_cache, tl.load(at_buffer, mask=mask, other=0.0), mask=mask)


def move_kv(caches: Sequence[Tensor], src: Tensor, tgt: Tensor) -> None:
    """As the reference's `move_kv`; the caches have one shape, stride and dtype."""
    check_slots("src", src)
    check_slots("tgt", tgt)
    num_rows = len(src)
    if num_rows == 0 or not caches:
        return
    first = caches[0]
    for cache in caches:
        check_heads("cache", cache)
        if (cache.shape, cache.stride(), cache.dtype) != (first.shape, first.stride(), first.dtype):
            raise ValueError(f"caches differ: {tuple(cache.shape)} and {tuple(first.shape)}")
    row = first.shape[1] * first.shape[2]
    table = _table_of(tuple(cache.data_ptr() for cache in caches), src.device)
    buffer = first.new_empty((len(caches), num_rows, row))
    for slots, is_gather in ((src, True), (tgt, False)):
        _copy_rows_kernel[(num_rows, len(caches))](
            table,
            buffer,
            slots,
            num_rows,
            first.stride(0),
            ROW=row,
            BLOCK=triton.next_power_of_2(row),
            IS_GATHER=is_gather,
        )


@lru_cache(maxsize=16)
def _table_of(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Addresses on the device; a pool moves KV among the same caches in every step."""
    table = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
    # From pinned memory, since a pageable copy waits for all that the device has to do.
    return table.to(device, non_blocking=True)
