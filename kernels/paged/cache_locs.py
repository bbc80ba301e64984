"""Slots between flat lists and rows of `req_to_token`: one program per req.

Where each req's piece begins is summed outside, so that no program reads all lengths and any batch
size will do. Every output cell is a function of inputs that no program writes.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_dtype

BLOCK = 256


@triton.jit
def _copy_row_kernel(
    req_to_token,
    req_pool_indices,
    starts,
    ends,
    flat_ends,
    flat,
    row_stride,
    INTO_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    start = tl.load(starts + b)
    length = (tl.load(ends + b) - start).to(tl.int32)
    row = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * row_stride + start
    piece = flat + tl.load(flat_ends + b) - length
    for first in range(0, length, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < length
        if INTO_ROW:
            slots = tl.load(piece + offs, mask=mask, other=0).to(tl.int32)
            tl.store(row + offs, slots, mask=mask)
        else:
            slots = tl.load(row + offs, mask=mask, other=0).to(tl.int64)
            tl.store(piece + offs, slots, mask=mask)


@triton.jit
def _assign_draft_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_lens,
    extend_ends,
    num_new_pages_per_topk,
    out_cache_loc,
    out,
    row_stride,
    topk,
    num_steps,
    page_size,
    IS_PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + b).to(tl.int64)
    row = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * row_stride
    lanes = topk * num_steps
    stride = num_steps
    partial = length * 0
    own_len = lanes
    own = out_cache_loc + b * lanes
    if IS_PAGED:
        stride = (tl.load(num_new_pages_per_topk + b) * page_size).to(tl.int32)
        partial = length % page_size
        own_len = tl.load(extend_lens + b).to(tl.int32)
        own = out_cache_loc + tl.load(extend_ends + b) - own_len
    for first in range(0, own_len, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < own_len
        slots = tl.load(own + offs, mask=mask, other=0)
        if IS_PAGED:
            # A later branch begins with the prefix's partial page, which no program writes.
            in_branch = (partial + offs) % stride
            is_copy = mask & (partial + offs >= stride) & (in_branch < partial)
            copied = tl.load(row + length - partial + in_branch, mask=is_copy, other=0)
            slots = tl.where(is_copy, copied.to(tl.int64), slots)
        tl.store(row + length + offs, slots.to(tl.int32), mask=mask)
    for first in range(0, lanes, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < lanes
        source = (offs // num_steps) * stride + offs % num_steps
        slots = tl.load(own + source, mask=mask, other=0)
        tl.store(out + b * lanes + offs, slots, mask=mask)


@triton.jit
def _src_tgt_kernel(
    out_cache_loc,
    accept_index,
    accept_length,
    freed_lens,
    accept_ends,
    freed_ends,
    src,
    tgt,
    freed,
    num_draft_tokens,
    accept_stride,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    num_kept = tl.load(accept_length + b) + 1
    num_freed = tl.load(freed_lens + b)
    kept_start = tl.load(accept_ends + b) - num_kept
    freed_start = tl.load(freed_ends + b) - num_freed
    own = out_cache_loc + b * num_draft_tokens
    for first in range(0, num_draft_tokens, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        is_kept = offs < num_kept
        node = tl.load(accept_index + b * accept_stride + offs, mask=is_kept, other=0)
        at = tl.load(out_cache_loc + node, mask=is_kept, other=0)
        tl.store(src + kept_start + offs, at, mask=is_kept)
        belongs = tl.load(own + offs, mask=is_kept, other=0)
        tl.store(tgt + kept_start + offs, belongs, mask=is_kept)
        is_freed = offs < num_freed
        left = tl.load(own + num_draft_tokens - num_freed + offs, mask=is_freed, other=0)
        tl.store(freed + freed_start + offs, left, mask=is_freed)


def assign_req_to_token_pool(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, ends: Tensor, src: Tensor
) -> None:
    """As the reference's `assign_req_to_token_pool`."""
    check_dtype("req_to_token", req_to_token, torch.int32)
    check_dtype("src", src, torch.int64)
    _copy_rows(req_to_token, req_pool_indices, starts, ends, src, into_row=True)


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, ends: Tensor, total: int
) -> Tensor:
    """As the reference's `assign_extend_cache_locs`."""
    check_dtype("req_to_token", req_to_token, torch.int32)
    out = torch.empty(total, dtype=torch.int64, device=req_to_token.device)
    _copy_rows(req_to_token, req_pool_indices, starts, ends, out, into_row=False)
    return out


def _copy_rows(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    starts: Tensor,
    ends: Tensor,
    flat: Tensor,
    *,
    into_row: bool,
) -> None:
    if len(starts) == 0:
        return
    _copy_row_kernel[(len(starts),)](
        req_to_token,
        req_pool_indices,
        starts,
        ends,
        (ends - starts).long().cumsum(0),
        flat,
        req_to_token.stride(0),
        INTO_ROW=into_row,
        BLOCK=BLOCK,
    )


def assign_draft_cache_locs(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    num_new_pages_per_topk: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> Tensor:
    """As the reference's `assign_draft_cache_locs`."""
    check_dtype("req_to_token", req_to_token, torch.int32)
    check_dtype("out_cache_loc", out_cache_loc, torch.int64)
    bs = len(seq_lens)
    out = torch.empty(bs * topk * num_steps, dtype=torch.int64, device=out_cache_loc.device)
    if out.numel():
        _assign_draft_kernel[(bs,)](
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_lens,
            extend_lens.long().cumsum(0),
            num_new_pages_per_topk,
            out_cache_loc,
            out,
            req_to_token.stride(0),
            topk,
            num_steps,
            page_size,
            IS_PAGED=page_size > 1 and topk > 1,
            BLOCK=BLOCK,
        )
    return out


def get_src_tgt_cache_loc(
    out_cache_loc: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's `get_src_tgt_cache_loc`; one sync, for the sizes."""
    check_dtype("out_cache_loc", out_cache_loc, torch.int64)
    bs = len(accept_length)
    if bs == 0:
        return out_cache_loc[:0], out_cache_loc[:0], out_cache_loc[:0]
    used = seq_lens.long() + accept_length + 1
    kept = (used + page_size - 1) // page_size * page_size - seq_lens
    freed_lens = (num_draft_tokens - kept).clamp_(min=0)
    accept_ends = (accept_length + 1).cumsum(0)
    freed_ends = freed_lens.cumsum(0)
    num_kept, num_freed = torch.stack((accept_ends[-1], freed_ends[-1])).tolist()
    src = out_cache_loc.new_empty(num_kept)
    tgt = out_cache_loc.new_empty(num_kept)
    freed = out_cache_loc.new_empty(num_freed)
    _src_tgt_kernel[(bs,)](
        out_cache_loc,
        accept_index,
        accept_length,
        freed_lens,
        accept_ends,
        freed_ends,
        src,
        tgt,
        freed,
        num_draft_tokens,
        accept_index.stride(0),
        BLOCK=BLOCK,
    )
    return src, tgt, freed
