"""Rows of `req_to_token` as CSR kv_indices, and the per-step form of draft lanes."""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_dtype

BLOCK = 512
# Programs that share one row; a row of 8192 tokens is then two blocks each.
PROGRAMS_PER_ROW = 8


@triton.jit
def _create_kv_indices_kernel(
    req_to_token,
    req_pool_indices,
    lens,
    kv_indptr,
    starts,
    kv_indices,
    row_stride,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    row = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * row_stride
    if HAS_STARTS:
        row += tl.load(starts + b)
    out = kv_indices + tl.load(kv_indptr + b).to(tl.int64)
    length = tl.load(lens + b)
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < length
        tl.store(out + offs, tl.load(row + offs, mask=mask, other=0), mask=mask)


@triton.jit
def _draft_kv_indices_kernel(
    req_to_token,
    req_pool_indices,
    seq_lens,
    lens_before,
    kv_indices,
    kv_indptr,
    row_stride,
    indices_stride,
    indptr_stride,
    page_size,
    topk,
    num_steps,
    IS_PAGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    branch = tl.program_id(1)
    step = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + b).to(tl.int64)
    row = req_to_token + tl.load(req_pool_indices + b).to(tl.int64) * row_stride
    lane_stride = num_steps
    if IS_PAGED:
        lane_stride = tl.cdiv(length % page_size + num_steps, page_size) * page_size
    lane = row + length + branch * lane_stride
    own = step + 1
    first_out = topk * (tl.load(lens_before + b) + b * own) + branch * (length + own)
    out = kv_indices + step * indices_stride + first_out
    for first in range(0, length, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < length
        tl.store(out + offs, tl.load(row + offs, mask=mask, other=0), mask=mask)
    for first in range(0, own, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < own
        tl.store(out + length + offs, tl.load(lane + offs, mask=mask, other=0), mask=mask)
    end = kv_indptr + step * indptr_stride + b * topk + branch + 1
    tl.store(end, (first_out + length + own).to(tl.int32))


def create_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    lens: Tensor,
    kv_indptr: Tensor,
    starts: Tensor | None,
    kv_indices: Tensor,
) -> None:
    """As the reference's `create_kv_indices`."""
    check_dtype("req_to_token", req_to_token, torch.int32)
    check_dtype("kv_indices", kv_indices, torch.int32)
    if len(lens) == 0:
        return
    _create_kv_indices_kernel[(len(lens), PROGRAMS_PER_ROW)](
        req_to_token,
        req_pool_indices,
        lens,
        kv_indptr,
        lens if starts is None else starts,
        kv_indices,
        req_to_token.stride(0),
        HAS_STARTS=starts is not None,
        BLOCK=BLOCK,
    )


def generate_draft_decode_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    page_size: int,
    topk: int,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    """As the reference's `generate_draft_decode_kv_indices`; one sync, for the size."""
    check_dtype("req_to_token", req_to_token, torch.int32)
    bs = len(seq_lens)
    ends = seq_lens.long().cumsum(0)
    total = int(ends[-1]) if bs else 0
    device = req_to_token.device
    width = topk * total + bs * topk * num_steps
    kv_indices = torch.zeros((num_steps, width), dtype=torch.int32, device=device)
    kv_indptr = torch.zeros((num_steps, bs * topk + 1), dtype=torch.int32, device=device)
    if bs and num_steps:
        _draft_kv_indices_kernel[(bs, topk, num_steps)](
            req_to_token,
            req_pool_indices,
            seq_lens,
            ends - seq_lens,
            kv_indices,
            kv_indptr,
            req_to_token.stride(0),
            kv_indices.stride(0),
            kv_indptr.stride(0),
            page_size,
            topk,
            num_steps,
            IS_PAGED=page_size > 1 and topk > 1,
            BLOCK=BLOCK,
        )
    return kv_indices, kv_indptr
