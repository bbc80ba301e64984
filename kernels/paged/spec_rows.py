"""Per-req numbers after a verify: the last new token, positions, lengths, what to evict."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_dtype

BLOCK = 128


@triton.jit
def _new_verified_id_kernel(accepted_ids, num_new_tokens, out, bs, row_stride, BLOCK: tl.constexpr):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = row < bs
    last = tl.load(num_new_tokens + row, mask=mask, other=1).to(tl.int64) - 1
    ids = tl.load(accepted_ids + row * row_stride + last, mask=mask, other=0)
    tl.store(out + row, ids, mask=mask)


@triton.jit
def _extend_info_kernel(
    verified_id, seq_lens, num_new_tokens, ends, positions, last_ids, BLOCK: tl.constexpr
):
    b = tl.program_id(0)
    count = tl.load(num_new_tokens + b).to(tl.int64)
    end = tl.load(ends + b)
    start = end - count
    first_position = tl.load(seq_lens + b).to(tl.int64) - count
    for first in range(0, count, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        tl.store(positions + start + offs, first_position + offs, mask=offs < count)
    tl.store(last_ids + b, tl.load(verified_id + end - 1))


@triton.jit
def _accept_filter_kernel(
    accept_length, is_finished, seq_lens, filter_out, seq_lens_out, bs, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < bs
    num_new = tl.load(accept_length + row, mask=mask, other=0) + 1
    done = tl.load(is_finished + row, mask=mask, other=0) != 0
    seq_len = tl.load(seq_lens + row, mask=mask, other=0)
    tl.store(filter_out + row, tl.where(done, 0, num_new), mask=mask)
    tl.store(seq_lens_out + row, seq_len + num_new, mask=mask)


@triton.jit
def _align_evict_kernel(
    evict_mask, seq_lens, out, num_nodes, row_stride, page_size, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + b).to(tl.int64)
    num_kept = seq_len * 0
    for first in range(0, num_nodes, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        evicted = tl.load(evict_mask + b * row_stride + offs, mask=offs < num_nodes, other=1)
        num_kept += tl.sum((evicted == 0).to(tl.int64))
    page = (seq_len + num_kept - 1) // page_size * page_size - seq_len
    for first in range(0, num_nodes, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < num_nodes
        evicted = tl.load(evict_mask + b * row_stride + offs, mask=mask, other=1) != 0
        in_page = (offs >= page) & (offs < page + page_size)
        tl.store(out + b * num_nodes + offs, evicted & (in_page == 0), mask=mask)


def fill_new_verified_id(accepted_ids: Tensor, num_new_tokens: Tensor) -> Tensor:
    """As the reference's `fill_new_verified_id`."""
    accepted_ids = accepted_ids.contiguous()
    bs = len(num_new_tokens)
    out = accepted_ids.new_empty(bs)
    if bs:
        _new_verified_id_kernel[(triton.cdiv(bs, BLOCK),)](
            accepted_ids, num_new_tokens, out, bs, accepted_ids.stride(0), BLOCK=BLOCK
        )
    return out


def create_extend_after_decode_spec_info(
    verified_id: Tensor, seq_lens: Tensor, num_new_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """As the reference's `create_extend_after_decode_spec_info`."""
    bs = len(num_new_tokens)
    positions = torch.empty(len(verified_id), dtype=torch.int64, device=verified_id.device)
    last_ids = verified_id.new_empty(bs)
    if bs:
        ends = num_new_tokens.long().cumsum(0)
        _extend_info_kernel[(bs,)](
            verified_id, seq_lens, num_new_tokens, ends, positions, last_ids, BLOCK=BLOCK
        )
    return positions, last_ids


def create_accept_length_filter(
    accept_length: Tensor, is_finished: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """As the reference's `create_accept_length_filter`."""
    check_dtype("is_finished", is_finished, torch.bool)
    bs = len(accept_length)
    filter_out, seq_lens_out = torch.empty_like(accept_length), torch.empty_like(seq_lens)
    if bs:
        _accept_filter_kernel[(triton.cdiv(bs, BLOCK),)](
            accept_length, is_finished, seq_lens, filter_out, seq_lens_out, bs, BLOCK=BLOCK
        )
    return filter_out, seq_lens_out


def align_evict_mask_to_page_size(evict_mask: Tensor, seq_lens: Tensor, page_size: int) -> Tensor:
    """As the reference's `align_evict_mask_to_page_size`."""
    check_dtype("evict_mask", evict_mask, torch.bool)
    evict_mask = evict_mask.contiguous()
    bs, num_nodes = evict_mask.shape
    out = torch.empty_like(evict_mask)
    if out.numel():
        _align_evict_kernel[(bs,)](
            evict_mask, seq_lens, out, num_nodes, evict_mask.stride(0), page_size, BLOCK=BLOCK
        )
    return out
