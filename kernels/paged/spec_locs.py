"""Slots of draft lanes and of accepted nodes, gathered from where they lie; no syncs."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_dtype

BLOCK = 128


@triton.jit
def _draft_locs_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
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
    row = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * row_stride + length
    lane_stride = num_steps
    if IS_PAGED:
        lane_stride = tl.cdiv(length % page_size + num_steps, page_size) * page_size
    num_slots = topk * num_steps
    for first in range(0, num_slots, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < num_slots
        at = offs // num_steps * lane_stride + offs % num_steps
        slots = tl.load(row + at, mask=mask, other=0).to(tl.int64)
        tl.store(out + b * num_slots + offs, slots, mask=mask)


@triton.jit
def _accepted_locs_kernel(accept_index, ranks, out_cache_loc, out, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    node = tl.load(accept_index + offs, mask=mask, other=-1)
    is_accepted = node >= 0
    rank = tl.load(ranks + offs, mask=is_accepted, other=1) - 1
    slots = tl.load(out_cache_loc + node, mask=is_accepted, other=0)
    tl.store(out + rank, slots, mask=is_accepted)


@triton.jit
def _filter_finished_kernel(
    tgt_cache_loc, accept_length, kept_lens, accept_ends, kept_ends, out, BLOCK: tl.constexpr
):
    b = tl.program_id(0)
    kept = tl.load(kept_lens + b).to(tl.int64)
    source = tgt_cache_loc + tl.load(accept_ends + b) - tl.load(accept_length + b) - 1
    target = out + tl.load(kept_ends + b) - kept
    for first in range(0, kept, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < kept
        tl.store(target + offs, tl.load(source + offs, mask=mask, other=0), mask=mask)


def get_draft_cache_locs(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> Tensor:
    """As the reference's `get_draft_cache_locs`."""
    check_dtype("req_to_token", req_to_token, torch.int32)
    bs = len(seq_lens)
    out = torch.empty(bs * topk * num_steps, dtype=torch.int64, device=req_to_token.device)
    if out.numel():
        _draft_locs_kernel[(bs,)](
            req_to_token,
            req_pool_indices,
            seq_lens,
            out,
            req_to_token.stride(0),
            topk,
            num_steps,
            page_size,
            IS_PAGED=page_size > 1 and topk > 1,
            BLOCK=BLOCK,
        )
    return out


def fill_accepted_out_cache_loc(accept_index: Tensor, out_cache_loc: Tensor) -> Tensor:
    """As the reference's `fill_accepted_out_cache_loc`."""
    nodes = accept_index.flatten()
    out = out_cache_loc.new_zeros(len(nodes))
    if len(nodes):
        ranks = (nodes >= 0).cumsum(0)
        _accepted_locs_kernel[(triton.cdiv(len(nodes), BLOCK),)](
            nodes, ranks, out_cache_loc, out, len(nodes), BLOCK=BLOCK
        )
    return out


def filter_finished_cache_loc(
    tgt_cache_loc: Tensor, accept_length: Tensor, accept_length_filter: Tensor, total: int
) -> Tensor:
    """As the reference's `filter_finished_cache_loc`."""
    out = tgt_cache_loc.new_empty(total)
    if total:
        _filter_finished_kernel[(len(accept_length),)](
            tgt_cache_loc,
            accept_length,
            accept_length_filter,
            (accept_length.long() + 1).cumsum(0),
            accept_length_filter.long().cumsum(0),
            out,
            BLOCK=BLOCK,
        )
    return out
