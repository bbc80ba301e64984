"""Attention of rows of queries over slots: the plan of a batch, and its execution per layer.

A row is a req's queries of this step and the slots of all its tokens. What depends on the batch
alone (offsets, masks, 64-bit slots, which rows lie in line) is worked out once per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from paceline.kernels.api import AttentionPlan

# Neighbouring rows with as many queries share one call over padded keys: a call of its own costs a
# row 20 us before its first key, the time of some 300 padded ones. bf16, 9/3 heads of 64, 8 rows,
# 2 threads: 68 us together and 204 us one by one at 128 keys each, 272 and 372 at 500, equal at
# 1000.
PADDING_PER_ROW = 256
# A row in line needs no copy, which is worth a call of its own from here on: 8 rows of 500 keys, as
# above, take one thread 445 us one by one and 560 together.
MIN_LONE_KEYS = 384
MAX_PADDED_KEYS = 16384  # bounds the copy of keys that a padded call makes
# Up to this many queries, those of a KV head's group are packed into one block, so that its keys
# are read once. Beyond it torch's own blocks are as good and the mask need not be repeated.
MAX_PACKED_QUERIES = 32


@dataclass(slots=True)
class RowGroup:
    """Neighbouring rows with `q_len` queries each that run as one call."""

    q_start: int
    num_rows: int
    q_len: int
    kv_len: int  # the longest row's
    first_slot: int = -1  # of a single row whose slots are one run; otherwise `slots`
    slots: Tensor | None = None  # [num_rows * kv_len] int64, 0 behind a row's end
    visible: Tensor | None = None  # [num_rows, q_len, kv_len] bool; None: all, or causal
    is_causal: bool = False
    _bias: Tensor | None = field(default=None, init=False)
    _bias_of: tuple[torch.dtype, int] | None = field(default=None, init=False)
    _rooms: list[Tensor | None] = field(default_factory=lambda: [None, None], init=False)

    def bias(self, dtype: torch.dtype, repeats: int) -> Tensor | None:
        """`visible` as what is added to scores, [num_rows, 1, repeats * q_len, kv_len]."""
        if self.visible is None:
            return None
        if self._bias is None or self._bias_of != (dtype, repeats):
            cells = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            cells.masked_fill_(~self.visible, float("-inf"))
            self._bias = cells.repeat(1, repeats, 1).unsqueeze(1)
            self._bias_of = (dtype, repeats)
        return self._bias

    def room(self, cache: Tensor, which: int) -> Tensor:
        """Where to gather K (which 0) or V (1), the same for each layer of a step.

        A fresh megabyte per layer would be paid for in page faults: 1100 us instead of 550 us for
        4 rows of 1000 keys.
        """
        assert self.slots is not None
        room = self._rooms[which]
        if room is None or room.dtype != cache.dtype or room.shape[1] != cache[0].numel():
            room = cache.new_empty((len(self.slots), cache[0].numel()))
            self._rooms[which] = room
        return room


@dataclass(frozen=True, slots=True)
class RowPlan(AttentionPlan):
    """The groups of a batch; `is_whole` when they cover every query."""

    groups: tuple[RowGroup, ...]
    is_whole: bool


def plan_attention(
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    q_lens: Sequence[int] | None = None,
    kv_lens: Sequence[int] | None = None,
) -> RowPlan:
    """Arguments as `KernelSet.plan_attention`, lengths read from the tensors.

    Rows without a query or a key are left out.
    """
    kv_starts = kv_indptr.tolist()
    bs = len(kv_starts) - 1
    q_starts = list(range(bs + 1)) if qo_indptr is None else qo_indptr.tolist()
    num_queries = [end - start for start, end in pairwise(q_starts)]
    num_keys = [end - start for start, end in pairwise(kv_starts)]
    visible: list[Tensor | None] = [None] * bs
    if tree_mask is not None and mask_indptr is not None:
        for b, (start, end) in enumerate(pairwise(mask_indptr.tolist())):
            if end > start:
                cells = tree_mask[start:end].view(num_queries[b], -1)
                visible[b] = _tree_rows(cells, num_keys[b])
    slots = kv_indices.to(torch.int64)
    in_line = _rows_in_line(slots, kv_starts)
    groups: list[RowGroup] = []
    live = [b for b in range(bs) if num_queries[b] and num_keys[b]]
    for q_len, same in groupby(live, key=num_queries.__getitem__):
        groups.extend(
            _group(rows, q_starts, q_len, kv_starts, num_keys, slots, in_line, visible)
            for rows in _batches(list(same), q_len, num_keys, in_line)
        )
    covered = sum(group.num_rows * group.q_len for group in groups)
    return RowPlan(tuple(groups), covered == sum(num_queries))


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: RowPlan, scale: float) -> Tensor:
    """q [T, Hq, D] over the slots of `plan` -> [T, Hq, D]; rows without keys give 0."""
    groups = plan.groups
    if plan.is_whole and len(groups) == 1:
        return _attend_group(q, k_cache, v_cache, groups[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not plan.is_whole:
        out.zero_()
    for group in groups:
        end = group.q_start + group.num_rows * group.q_len
        own = q[group.q_start : end]
        out[group.q_start : end] = _attend_group(own, k_cache, v_cache, group, scale)
    return out


def _attend_group(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: RowGroup, scale: float
) -> Tensor:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    repeats = num_q_heads // num_kv_heads
    bs, q_len = group.num_rows, group.q_len
    k = _gather(k_cache, group, 0, q.dtype)  # [bs, Hkv, kv_len, D]
    v = _gather(v_cache, group, 1, q.dtype)
    if q_len == 1:
        packed = q.view(bs, num_kv_heads, repeats, head_dim)
        bias = group.bias(q.dtype, repeats)
        out = scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=scale)
        return out.reshape(num_tokens, num_q_heads, head_dim)
    if q_len <= MAX_PACKED_QUERIES:
        heads = q.view(bs, q_len, num_kv_heads, repeats, head_dim).permute(0, 2, 3, 1, 4)
        packed = heads.reshape(bs, num_kv_heads, repeats * q_len, head_dim)
        bias = group.bias(q.dtype, repeats)
        out = scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=scale)
        heads = out.view(bs, num_kv_heads, repeats, q_len, head_dim).permute(0, 3, 1, 2, 4)
        return heads.reshape(num_tokens, num_q_heads, head_dim)
    out = scaled_dot_product_attention(
        q.view(bs, q_len, num_q_heads, head_dim).transpose(1, 2),
        k,
        v,
        attn_mask=group.bias(q.dtype, 1),
        is_causal=group.is_causal,
        scale=scale,
        enable_gqa=repeats > 1,
    )
    return out.transpose(1, 2).reshape(num_tokens, num_q_heads, head_dim)


def _gather(cache: Tensor, group: RowGroup, which: int, dtype: torch.dtype) -> Tensor:
    """The keys or values of a group, [num_rows, Hkv, kv_len, D]; a view where slots are in line."""
    if group.slots is None:
        own = cache[group.first_slot : group.first_slot + group.kv_len].unsqueeze(0)
    else:
        rows = torch.index_select(cache.flatten(1), 0, group.slots, out=group.room(cache, which))
        own = rows.view(group.num_rows, group.kv_len, *cache.shape[1:])
    return own.transpose(1, 2).to(dtype)


def _tree_rows(cells: Tensor, kv_len: int) -> Tensor:
    """cells [q_len, tree_len] over the last keys -> [q_len, kv_len], all true before them."""
    q_len, tree_len = cells.shape
    rows = torch.ones((q_len, kv_len), dtype=torch.bool, device=cells.device)
    rows[:, kv_len - tree_len :] = cells
    return rows


def _rows_in_line(slots: Tensor, kv_starts: list[int]) -> list[bool]:
    """Which rows' slots are first, first + 1, ...: no break between a row's neighbours."""
    if len(slots) < 2:
        return [True] * (len(kv_starts) - 1)
    breaks = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)
    torch.cumsum(slots[1:] != slots[:-1] + 1, 0, out=breaks[1:])
    # A row is in line when the count of breaks up to its last slot is that up to its first.
    ends = torch.tensor(kv_starts, device=slots.device).clamp_(max=len(slots) - 1)
    firsts = breaks[ends[:-1]]
    lasts = breaks[(torch.tensor(kv_starts[1:], device=slots.device) - 1).clamp_(min=0)]
    same: list[bool] = (firsts == lasts).tolist()
    return same


def _batches(
    rows: list[int], q_len: int, kv_lens: list[int], in_line: list[bool]
) -> list[list[int]]:
    """Rows of equal q_len cut into what shares a call; only neighbours do."""
    if q_len > MAX_PACKED_QUERIES:
        return [[b] for b in rows]
    cut: list[list[int]] = []
    longest = total = 0
    may_join = False
    for b in rows:
        could_join, may_join = may_join, not (in_line[b] and kv_lens[b] >= MIN_LONE_KEYS)
        if could_join and may_join and cut[-1][-1] == b - 1:
            num_rows = len(cut[-1]) + 1
            longest, total = max(longest, kv_lens[b]), total + kv_lens[b]
            padded = longest * num_rows
            if padded <= min(total + PADDING_PER_ROW * num_rows, MAX_PADDED_KEYS):
                cut[-1].append(b)
                continue
        cut.append([b])
        longest = total = kv_lens[b]
    return cut


def _group(
    rows: list[int],
    q_starts: list[int],
    q_len: int,
    kv_starts: list[int],
    kv_lens: list[int],
    slots: Tensor,
    in_line: list[bool],
    visible: list[Tensor | None],
) -> RowGroup:
    kv_len = max(kv_lens[b] for b in rows)
    group = RowGroup(q_starts[rows[0]], len(rows), q_len, kv_len)
    b = rows[0]
    if len(rows) == 1:
        if in_line[b]:
            group.first_slot = int(slots[kv_starts[b]])
        else:
            group.slots = slots[kv_starts[b] : kv_starts[b + 1]]
        if visible[b] is None and q_len == 1:
            return group
        if visible[b] is None and q_len > MAX_PACKED_QUERIES and q_len == kv_len:
            group.is_causal = True
            return group
    else:
        padded = torch.zeros((len(rows), kv_len), dtype=torch.int64, device=slots.device)
        for i, b in enumerate(rows):
            padded[i, : kv_lens[b]] = slots[kv_starts[b] : kv_starts[b + 1]]
        group.slots = padded.flatten()
        if q_len == 1 and all(kv_lens[b] == kv_len and visible[b] is None for b in rows):
            return group
    seen = torch.zeros((len(rows), q_len, kv_len), dtype=torch.bool, device=slots.device)
    for i, b in enumerate(rows):
        own = visible[b]
        if own is None:
            ones = torch.ones((q_len, kv_lens[b]), dtype=torch.bool, device=slots.device)
            own = ones.tril_(kv_lens[b] - q_len)
        seen[i, :, : kv_lens[b]] = own
    group.visible = seen
    return group
