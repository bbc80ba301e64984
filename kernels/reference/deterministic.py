"""DeterministicReference: the reference set, with a row's result free of the rows beside it.

Torch's own attention is not: how it sums depends on how many queries and keys a call has. Here a
query's keys are cut into tiles at absolute positions. Products are fp32, those with V tile by tile,
in order; all calls are of shapes for which the library under torch sums alike: a test holds this
for many shapes, and a rank tries it at start (worker/target/self_check.py). Keys that a query does
not see weigh exactly 0, so padding and neighbours change nothing.

A node of a tree sees the prefix and its ancestors. From the last whole tile of the prefix on its
keys are gathered for it alone, so that they stand where plain decoding has them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.api import AttentionPlan
from paceline.kernels.reference.act import silu_and_mul
from paceline.kernels.reference.kernel_set import ReferenceKernels

KEY_TILE = 64
# Products of fewer rows take other paths in MKL: 1, 2 and 3 rows each gave bits of their own.
MIN_ROWS = 8
MAX_QUERIES = 128  # of a call for one row; bounds the scores, and what a causal call computes idly
MAX_PADDED_KEYS = 16384  # bounds the copy of keys of a call for several rows
PADDING_PER_ROW = 256  # keys that cost a row no more than a call of its own
# Torch's elementwise ops give a thread no less than this, and the last few elements of a thread's
# share go another way than the rest. Below it there is one share, and its ends are those of rows.
ONE_SHARE = 32768

Slots = NDArray[np.int64]


class DeterministicReference(ReferenceKernels):
    """For CPUs. The name stays: results differ from the plain set's in their last bits only."""

    @staticmethod
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        num_tokens, width = gate_up.shape
        rows = max(ONE_SHARE // width, 1)
        if num_tokens <= rows:
            return silu_and_mul(gate_up)
        return torch.cat([silu_and_mul(part) for part in gate_up.split(rows)])

    @staticmethod
    def plan_attention(  # type: ignore[override]  # each set has a plan of its own
        qo_indptr: Tensor | None,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        tree_mask: Tensor | None = None,
        mask_indptr: Tensor | None = None,
        *,
        q_lens: Sequence[int] | None = None,
        kv_lens: Sequence[int] | None = None,
    ) -> "TilePlan":
        """Lengths are read from the tensors."""
        return plan_tiles(qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr)

    @staticmethod
    def decode_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        if not isinstance(plan, TilePlan):
            plan = plan_tiles(None, kv_indptr, kv_indices, None, None)
        return attend_tiles(q, k_cache, v_cache, plan, scale)

    @staticmethod
    def extend_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        tree_mask: Tensor | None,
        mask_indptr: Tensor | None,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        if not isinstance(plan, TilePlan):
            plan = plan_tiles(qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr)
        return attend_tiles(q, k_cache, v_cache, plan, scale)


@dataclass(slots=True)
class TileCall:
    """Neighbouring rows with `q_len` queries each that run as one call.

    `shared` are the keys that all queries of a row may see, `own` those of one query. Both lengths
    are whole tiles, with slot 0 behind a row's or query's last; one of them may be 0.
    """

    q_start: int
    num_rows: int
    q_len: int
    shared: Tensor  # [num_rows * shared_len] int64 slots
    own: Tensor  # [num_rows * q_len * own_len] int64 slots
    bias: Tensor  # [num_rows, 1, q_len, 1, shared_len + own_len] fp32: 0, or -inf where unseen
    _rooms: dict[tuple[str, tuple[int, ...]], Tensor] = field(default_factory=dict, init=False)

    def gather(self, cache: Tensor, which: str) -> tuple[Tensor, Tensor]:
        """fp32 keys or values, [num_rows * Hkv, shared_len, D] and [num_rows * Hkv * q_len,
        own_len, D], which the next call with the same `which` overwrites."""
        _, num_heads, head_dim = cache.shape
        num_rows, q_len = self.num_rows, self.q_len
        shared_len, own_len = len(self.shared) // num_rows, len(self.own) // (num_rows * q_len)
        flat = cache.flatten(1)
        shared = flat.index_select(0, self.shared).view(num_rows, shared_len, num_heads, head_dim)
        shared = self._widen(shared.transpose(1, 2), which)
        shared = shared.view(num_rows * num_heads, shared_len, head_dim)
        if own_len == 0:
            return shared, shared[:, :0]
        own = flat.index_select(0, self.own).view(num_rows, q_len, own_len, num_heads, head_dim)
        own = self._widen(own.permute(0, 3, 1, 2, 4), f"own {which}")
        return shared, own.view(num_rows * num_heads * q_len, own_len, head_dim)

    def _widen(self, x: Tensor, name: str) -> Tensor:
        """Into the same memory for each layer: fresh pages cost more than the copy."""
        room = self._rooms.get((name, x.shape))
        if room is None:
            room = self._rooms[name, x.shape] = x.new_empty(x.shape, dtype=torch.float32)
        return room.copy_(x)


@dataclass(frozen=True, slots=True)
class TilePlan(AttentionPlan):
    calls: tuple[TileCall, ...]


def plan_tiles(
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None,
    mask_indptr: Tensor | None,
) -> TilePlan:
    """Arguments as `KernelSet.plan_attention`. Rows without a query or a key are left out."""
    kv_starts = kv_indptr.tolist()
    q_starts = list(range(len(kv_starts))) if qo_indptr is None else qo_indptr.tolist()
    slots = kv_indices.numpy().astype(np.int64)
    cell_starts = [0] * len(kv_starts)
    if tree_mask is not None and mask_indptr is not None:
        cell_starts = mask_indptr.tolist()
    rows: list[_Row] = []
    for b, ((q_start, q_stop), (start, stop)) in enumerate(
        zip(pairwise(q_starts), pairwise(kv_starts), strict=True)
    ):
        if q_start == q_stop or start == stop:
            continue
        if cell_starts[b] < cell_starts[b + 1]:
            assert tree_mask is not None
            cells = tree_mask[cell_starts[b] : cell_starts[b + 1]].numpy()
            rows.append(_tree_row(q_start, slots[start:stop], cells.reshape(q_stop - q_start, -1)))
        else:
            rows.extend(_causal_rows(q_start, q_stop - q_start, slots[start:stop]))
    return TilePlan(tuple(_call(some) for some in _batches(rows)))


def attend_tiles(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: TilePlan, scale: float
) -> Tensor:
    """q [T, Hq, D] over the slots of `plan` -> [T, Hq, D]; rows without keys give 0."""
    out = torch.zeros_like(q)
    for call in plan.calls:
        stop = call.q_start + call.num_rows * call.q_len
        out[call.q_start : stop] = _attend(q[call.q_start : stop], k_cache, v_cache, call, scale)
    return out


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, call: TileCall, scale: float) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[1:]
    repeats = q.shape[1] // num_kv_heads
    num_groups = call.num_rows * num_kv_heads  # queries of a group read the same shared keys
    num_queries = call.q_len * repeats
    heads = q.view(call.num_rows, call.q_len, num_kv_heads, repeats, head_dim)
    heads = heads.permute(0, 2, 1, 3, 4).float() * scale
    keys, own_keys = call.gather(k_cache, "k")
    values, own_values = call.gather(v_cache, "v")
    num_shared, num_own = keys.shape[1], own_keys.shape[1]
    together = _at_least(heads.reshape(num_groups, num_queries, head_dim))
    scores = torch.bmm(together, keys.transpose(1, 2))[:, :num_queries]
    if num_own:
        alone = _at_least(heads.reshape(num_groups * call.q_len, repeats, head_dim))
        own_scores = torch.bmm(alone, own_keys.transpose(1, 2))[:, :repeats]
        own_scores = own_scores.reshape(num_groups, num_queries, num_own)
        scores = torch.cat([scores, own_scores], -1)
    num_keys = num_shared + num_own
    scores = scores.reshape(call.num_rows, num_kv_heads, call.q_len, repeats, num_keys)
    probs = scores.add_(call.bias).softmax(-1).view(num_groups, num_queries, num_keys)
    sums = torch.zeros_like(together)
    _add_tiles(sums, _at_least(probs[:, :, :num_shared]), values)
    sums = sums[:, :num_queries]
    if num_own:
        own_probs = probs[:, :, num_shared:].reshape(num_groups * call.q_len, repeats, num_own)
        own_sums = _at_least(sums.reshape(num_groups * call.q_len, repeats, head_dim))
        _add_tiles(own_sums, _at_least(own_probs), own_values)
        sums = own_sums[:, :repeats]
    out = sums.reshape(call.num_rows, num_kv_heads, call.q_len, repeats, head_dim)
    return out.permute(0, 2, 1, 3, 4).reshape(q.shape).to(q.dtype)


def _add_tiles(sums: Tensor, probs: Tensor, values: Tensor) -> None:
    """sums [n, rows, D] += probs [n, rows, len] @ values [n, len, D], one tile after the other."""
    for start in range(0, values.shape[1], KEY_TILE):
        stop = start + KEY_TILE
        sums.baddbmm_(probs[:, :, start:stop], values[:, start:stop])


def _at_least(x: Tensor) -> Tensor:
    """x [n, rows, ..] with MIN_ROWS rows or more, those added 0."""
    missing = MIN_ROWS - x.shape[1]
    return pad(x, (0, 0, 0, missing)) if missing > 0 else x


@dataclass(frozen=True, slots=True)
class _Row:
    """Some queries of a row. `own` has an entry for each of them, or none where no key is."""

    q_start: int
    q_len: int
    shared: Slots
    num_seen: NDArray[np.int64]  # [q_len]: of the shared keys, from the first
    own: tuple[Slots, ...] = ()


def _causal_rows(q_start: int, q_len: int, slots: Slots) -> Iterator[_Row]:
    first_seen = len(slots) - q_len + 1
    for start in range(0, q_len, MAX_QUERIES):
        stop = min(start + MAX_QUERIES, q_len)
        num_seen = np.arange(first_seen + start, first_seen + stop)
        yield _Row(q_start + start, stop - start, slots[: num_seen[-1]], num_seen)


def _tree_row(q_start: int, slots: Slots, cells: NDArray[np.bool_]) -> _Row:
    """cells [q_len, tree_len] over the last keys."""
    q_len, tree_len = cells.shape
    prefix_len = len(slots) - tree_len
    num_shared = prefix_len // KEY_TILE * KEY_TILE
    rest, nodes = slots[num_shared:prefix_len], slots[prefix_len:]
    own = tuple(np.concatenate([rest, nodes[seen]]) for seen in cells)
    return _Row(q_start, q_len, slots[:num_shared], np.full(q_len, num_shared), own)


def _batches(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    """Neighbours of equal q_len and kind, as many as share a call cheaply."""
    some: list[_Row] = []
    longest = total = 0
    for row in rows:
        num_keys = len(row.shared)
        if some:
            first, padded = some[0], max(longest, num_keys) * (len(some) + 1)
            allowed = min(total + num_keys + PADDING_PER_ROW * (len(some) + 1), MAX_PADDED_KEYS)
            is_alike = first.q_len == row.q_len and bool(first.own) == bool(row.own)
            if not is_alike or padded > allowed:
                yield some
                some, longest, total = [], 0, 0
        some.append(row)
        longest, total = max(longest, num_keys), total + num_keys
    if some:
        yield some


def _call(rows: list[_Row]) -> TileCall:
    num_rows, q_len = len(rows), rows[0].q_len
    shared_len = _whole_tiles(max(len(row.shared) for row in rows))
    own_len = _whole_tiles(max((len(own) for row in rows for own in row.own), default=0))
    shared = np.zeros((num_rows, shared_len), dtype=np.int64)
    own = np.zeros((num_rows, q_len, own_len), dtype=np.int64)
    bias = np.full((num_rows, q_len, shared_len + own_len), -np.inf, dtype=np.float32)
    for i, row in enumerate(rows):
        shared[i, : len(row.shared)] = row.shared
        for j, num_seen in enumerate(row.num_seen):
            bias[i, j, :num_seen] = 0.0
        for j, slots in enumerate(row.own):
            own[i, j, : len(slots)] = slots
            bias[i, j, shared_len : shared_len + len(slots)] = 0.0
    return TileCall(
        rows[0].q_start,
        num_rows,
        q_len,
        torch.from_numpy(shared).flatten(),
        torch.from_numpy(own).flatten(),
        torch.from_numpy(bias).view(num_rows, 1, q_len, 1, -1),
    )


def _whole_tiles(num_keys: int) -> int:
    return -(-num_keys // KEY_TILE) * KEY_TILE
