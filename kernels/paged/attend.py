"""Attention of rows of queries over slots, in two stages.

A program takes one row (a req), one KV head, a block of that head's queries (`tokens x group`
packed, so that a key is loaded once for the whole group) and a share of the row's keys. With one
share it writes the answer; with more, each writes its part in fp32 and a second launch joins them.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.checks import check_attention, check_heads

BLOCK_N = 64
# A tensor core takes 16 rows at least; 64 keep a long prefill's accumulators in registers.
MIN_BLOCK_M = 16
MAX_BLOCK_M = 64
# Programs wanted in flight before keys are no longer shared out: two per multiprocessor of an H200.
TARGET_PROGRAMS = 264
MAX_SPLITS = 32
# Not worth sharing fewer keys than this: the join costs as much as reading them.
MIN_KEYS_PER_SPLIT = 256


@dataclass(frozen=True, slots=True)
class LaunchPlan(AttentionPlan):
    """What a launch needs to know on the host."""

    max_q_len: int
    max_kv_len: int | None  # None: unknown, and not worth a sync


# Where a batch is a part of a step's rows, kv_indptr begins anywhere in theirs.
@triton.jit(do_not_specialize_on_alignment=["kv_indptr"])
def _attend_kernel(
    q,
    k_cache,
    v_cache,
    out,
    part_out,
    part_lse,
    qo_indptr,
    kv_indptr,
    kv_indices,
    tree_mask,
    mask_indptr,
    scale_log2,
    num_tokens,
    q_stride,
    k_stride,
    v_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_TREE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    b = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_q_heads = tl.num_programs(1) * GROUP
    m_block = tl.program_id(2) // NUM_SPLITS
    split = tl.program_id(2) % NUM_SPLITS

    if IS_DECODE:
        q_start = b
        q_len = 1
    else:
        q_start = tl.load(qo_indptr + b)
        q_len = tl.load(qo_indptr + b + 1) - q_start
    kv_start = tl.load(kv_indptr + b).to(tl.int64)
    kv_len = (tl.load(kv_indptr + b + 1) - kv_start).to(tl.int32)

    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = query < q_len
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    token = (q_start + query).to(tl.int64)
    q_at = q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :]
    q_block = tl.load(q_at, mask=is_row[:, None] & is_dim[None, :], other=0.0).to(DOT_DTYPE)

    last_query = tl.minimum(((m_block + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
    num_keys = kv_len - q_len + last_query + 1  # what the block's last query sees, if causal
    if HAS_TREE:
        mask_start = tl.load(mask_indptr + b).to(tl.int64)
        num_cells = (tl.load(mask_indptr + b + 1) - mask_start).to(tl.int32)
        tree_len = num_cells // tl.maximum(q_len, 1)  # 0: a causal row
        num_keys = tl.where(tree_len > 0, kv_len, num_keys)
    if m_block * BLOCK_M >= q_len * GROUP:
        num_keys = 0
    share = tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_N) * BLOCK_N
    first = split * share
    end = tl.minimum(first + share, num_keys)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_key = n < end
        slot = tl.load(kv_indices + kv_start + n, mask=is_key, other=0).to(tl.int64)
        loaded = is_key[:, None] & is_dim[None, :]
        k_at = k_cache + slot[:, None] * k_stride + kv_head * HEAD_DIM + d[None, :]
        k = tl.load(k_at, mask=loaded, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q_block, tl.trans(k), input_precision="ieee") * scale_log2
        if IS_DECODE:
            seen = is_row[:, None] & is_key[None, :]
        else:
            seen = is_row[:, None] & is_key[None, :]
            causal = n[None, :] <= kv_len - q_len + query[:, None]
            if HAS_TREE:
                column = n[None, :] - (kv_len - tree_len)
                in_tree = seen & (column >= 0)
                cell = mask_start + query[:, None] * tree_len + column
                allowed = tl.load(tree_mask + cell, mask=in_tree, other=1) != 0
                seen = seen & tl.where(tree_len > 0, allowed, causal)
            else:
                seen = seen & causal
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet must not compute inf - inf.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        v_at = v_cache + slot[:, None] * v_stride + kv_head * HEAD_DIM + d[None, :]
        v = tl.load(v_at, mask=loaded, other=0.0).to(DOT_DTYPE)
        acc = acc * fade[:, None] + tl.dot(weights.to(DOT_DTYPE), v, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        top = new_top

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = token * num_q_heads + head
    stored = is_row[:, None] & is_dim[None, :]
    if NUM_SPLITS == 1:
        at = out + row[:, None] * HEAD_DIM + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=stored)
    else:
        part = split.to(tl.int64) * num_tokens * num_q_heads + row
        tl.store(part_out + part[:, None] * HEAD_DIM + d[None, :], acc, mask=stored)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        tl.store(part_lse + part, lse, mask=is_row)


@triton.jit
def _join_kernel(
    out,
    part_out,
    part_lse,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_dim = d < HEAD_DIM
    split = tl.arange(0, NUM_SPLITS)
    lse = tl.load(part_lse + split * num_rows + row)
    top = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    at = part_out + (split[:, None] * num_rows + row) * HEAD_DIM + d[None, :]
    parts = tl.load(at, mask=is_dim[None, :] & (weights > 0)[:, None], other=0.0)
    total = tl.sum(weights, 0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + d, joined.to(out.dtype.element_ty), mask=is_dim)


def plan_attention(
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    q_lens: Sequence[int] | None = None,
    kv_lens: Sequence[int] | None = None,
) -> LaunchPlan:
    """As `KernelSet.plan_attention`; syncs when queries vary and the host was not told how."""
    if qo_indptr is None:
        max_q_len = 1
    elif q_lens is not None:
        max_q_len = max(q_lens, default=0)
    else:
        max_q_len = int((qo_indptr[1:] - qo_indptr[:-1]).max()) if len(qo_indptr) > 1 else 0
    return LaunchPlan(max_q_len, None if kv_lens is None else max(kv_lens, default=0))


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None,
    mask_indptr: Tensor | None,
    scale: float,
    plan: LaunchPlan,
) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]; qo_indptr None is one query per row."""
    check_attention(q, k_cache, v_cache)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_heads(name, x)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_q_heads // num_kv_heads
    bs = len(kv_indptr) - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or bs == 0:
        return out
    rows = plan.max_q_len * group
    block_m = min(max(triton.next_power_of_2(rows), MIN_BLOCK_M), MAX_BLOCK_M)
    num_blocks = triton.cdiv(rows, block_m)
    num_splits = _num_splits(bs * num_kv_heads * num_blocks, plan.max_kv_len)
    part_out = part_lse = out
    if num_splits > 1:
        part_out = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(part_out.shape[:-1], dtype=torch.float32, device=q.device)
    has_tree = tree_mask is not None and mask_indptr is not None
    block_d = max(triton.next_power_of_2(head_dim), 16)
    _attend_kernel[(bs, num_kv_heads, num_blocks * num_splits)](
        q,
        k_cache,
        v_cache,
        out,
        part_out,
        part_lse,
        kv_indptr if qo_indptr is None else qo_indptr,
        kv_indptr,
        kv_indices,
        tree_mask.view(torch.uint8) if has_tree and tree_mask is not None else kv_indptr,
        mask_indptr if has_tree else kv_indptr,
        scale * 1.4426950408889634,  # log2(e): exp2 is one instruction
        num_tokens,
        q.stride(0),
        k_cache.stride(0),
        v_cache.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N if q.element_size() == 2 else BLOCK_N // 2,
        NUM_SPLITS=num_splits,
        IS_DECODE=qo_indptr is None,
        HAS_TREE=has_tree,
        DOT_DTYPE=_dot_dtype(q),
    )
    if num_splits > 1:
        num_rows = num_tokens * num_q_heads
        _join_kernel[(num_rows,)](
            out,
            part_out,
            part_lse,
            num_rows,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            NUM_SPLITS=num_splits,
        )
    return out


def _dot_dtype(q: Tensor) -> Any:
    """The inputs' own dtype; fp32 where Triton interprets, whose dot takes bf16 for integers."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return tl.float16 if q.dtype == torch.float16 else tl.bfloat16
    return tl.float32


def _num_splits(num_programs: int, max_kv_len: int | None) -> int:
    """A power of two, so that few variants compile."""
    wanted = min(triton.cdiv(TARGET_PROGRAMS, num_programs), MAX_SPLITS)
    if max_kv_len is not None:
        wanted = min(wanted, triton.cdiv(max_kv_len, MIN_KEYS_PER_SPLIT))
    return 1 << (int(max(wanted, 1)).bit_length() - 1)
