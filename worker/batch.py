"""Batch: a StepPlan as device tensors.

Built from the plan and `req_to_token` alone; knows neither weights nor what a token means.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.api import AttentionPlan, KernelSet
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.step import ReqStep, StepPlan

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Neighbouring rows of a batch that share one attention call; offsets count from their first.

    `qo_indptr` is None for rows of one query each that see all their keys.
    """

    start: int  # tokens start..stop of the batch
    stop: int
    qo_indptr: Tensor | None
    kv_indptr: Tensor
    kv_indices: Tensor
    tree_mask: Tensor | None
    mask_indptr: Tensor | None
    plan: AttentionPlan | None  # the kernel set's own


@dataclass(frozen=True, slots=True)
class Batch:
    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    out_cache_loc: Tensor  # [num_tokens] int64
    decode: AttentionRows | None
    extend: AttentionRows | None
    logit_indices: Tensor | None  # [num_logits] int64; None: every token, in order

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])


def build_batch(plan: StepPlan, req_to_token: ReqToToken, kernels: KernelSet) -> Batch:
    """Writes the plan's pages into `req_to_token` and lays its rows out as tensors.

    Leading rows of one query that sees all its keys take the decode path, whatever their phase;
    the rest, chains, trees and prompts, share the extend path.
    """
    rows = plan.rows
    assert rows, "a plan has at least one row"
    trees = [_tree(row.parents, row.num_cached_nodes) if row.parents else None for row in rows]
    req_to_token.write_pages(rows)
    input_ids: list[int] = []
    positions: list[IntArray] = []
    slots: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for row, tree in zip(rows, trees, strict=True):
        num_tokens = len(row.input_ids)
        start = row.prefix_len + row.num_cached_nodes
        stop = start + num_tokens
        assert num_tokens > 0, "a row computes at least one token"
        assert stop <= req_to_token.width, (stop, req_to_token.width)
        assert row.parents is None or len(row.parents) == row.num_cached_nodes + num_tokens
        input_ids.extend(row.input_ids)
        slots.append(req_to_token.host[row.req_pool_index, start:stop])
        positions.append(np.arange(start, stop) if tree is None else row.prefix_len + tree.depths)
    out_cache_loc = np.concatenate(slots)
    assert out_cache_loc.min() >= req_to_token.page_size, "a token has no slot of its own"
    logit_indices = _logit_indices(rows)
    longs = _Upload(req_to_token.table.device, torch.int64)
    longs.add(np.array(input_ids, dtype=np.int64))
    longs.add(np.concatenate(positions))
    longs.add(out_cache_loc)
    longs.add(np.array([row.req_pool_index for row in rows], dtype=np.int64))
    if logit_indices is not None:
        longs.add(logit_indices)
    parts = longs.send()
    num_decodes = _count_decodes(rows, trees)
    decode = extend = None
    if num_decodes:
        decode = _attention_rows(
            rows[:num_decodes],
            trees[:num_decodes],
            0,
            parts[3][:num_decodes],
            req_to_token,
            kernels,
        )
    if num_decodes < len(rows):
        extend = _attention_rows(
            rows[num_decodes:], trees[num_decodes:], num_decodes, parts[3][num_decodes:],
            req_to_token, kernels,
        )  # fmt: skip
    return Batch(
        input_ids=parts[0],
        positions=parts[1],
        out_cache_loc=parts[2],
        decode=decode,
        extend=extend,
        logit_indices=None if logit_indices is None else parts[4],
    )


@dataclass(frozen=True, slots=True)
class _Tree:
    """The new nodes of a row that branches; a chain has none of this."""

    depths: IntArray  # [num_new]
    mask: BoolArray  # [num_new * num_nodes], flat: which nodes each new node sees


# Small trees come again, large ones seldom do and take up to a megabyte each.
@lru_cache(maxsize=256)
def _tree(parents: tuple[int, ...], num_cached: int) -> _Tree | None:
    """None for a chain, which is causal."""
    num_nodes = len(parents)
    if parents == tuple(range(-1, num_nodes - 1)):
        return None
    sees = np.zeros((num_nodes, num_nodes), dtype=np.bool_)
    for node, parent in enumerate(parents):
        assert -1 <= parent < node, (node, parent)
        if parent >= 0:
            sees[node] = sees[parent]
        sees[node, node] = True
    new = sees[num_cached:]
    return _Tree(depths=new.sum(axis=1, dtype=np.int64) - 1, mask=new.reshape(-1))


def _count_decodes(rows: Sequence[ReqStep], trees: Sequence[_Tree | None]) -> int:
    for i, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        if len(row.input_ids) > 1 or tree is not None:
            return i
    return len(rows)


def _logit_indices(rows: Sequence[ReqStep]) -> IntArray | None:
    """Which tokens want logits; None for all."""
    if all(row.num_logits in (-1, len(row.input_ids)) for row in rows):
        return None
    wanted: list[int] = []
    stop = 0
    for row in rows:
        num_tokens = len(row.input_ids)
        stop += num_tokens
        num_logits = num_tokens if row.num_logits == -1 else row.num_logits
        assert 0 <= num_logits <= num_tokens, (num_logits, num_tokens)
        wanted.extend(range(stop - num_logits, stop))
    return np.array(wanted, dtype=np.int64)


def _attention_rows(
    rows: Sequence[ReqStep],
    trees: Sequence[_Tree | None],
    start: int,
    req_pool_indices: Tensor,
    req_to_token: ReqToToken,
    kernels: KernelSet,
) -> AttentionRows:
    """`start`: tokens of the batch before these rows."""
    device = req_to_token.table.device
    q_lens = [len(row.input_ids) for row in rows]
    kv_lens = [
        row.prefix_len + row.num_cached_nodes + q_len
        for row, q_len in zip(rows, q_lens, strict=True)
    ]
    is_decode = start == 0 and max(q_lens) == 1 and not any(trees)
    masks = [tree.mask for tree in trees if tree is not None]
    ints = _Upload(device, torch.int32)
    ints.add(np.array([0, *accumulate(kv_lens)], dtype=np.int32))
    ints.add(np.array(kv_lens, dtype=np.int32))
    if not is_decode:
        ints.add(np.array([0, *accumulate(q_lens)], dtype=np.int32))
    if masks:
        mask_lens = (0 if tree is None else len(tree.mask) for tree in trees)
        ints.add(np.array([0, *accumulate(mask_lens)], dtype=np.int32))
    parts = ints.send()
    kv_indptr, lens = parts[0], parts[1]
    qo_indptr = None if is_decode else parts[2]
    tree_mask = torch.from_numpy(np.concatenate(masks)).to(device) if masks else None
    mask_indptr = parts[3] if masks else None
    kv_indices = torch.empty(sum(kv_lens), dtype=torch.int32, device=device)
    kernels.create_kv_indices(
        req_to_token.table, req_pool_indices, lens, kv_indptr, None, kv_indices
    )
    return AttentionRows(
        start=start,
        stop=start + sum(q_lens),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        tree_mask=tree_mask,
        mask_indptr=mask_indptr,
        plan=kernels.plan_attention(
            qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr, q_lens=q_lens, kv_lens=kv_lens
        ),
    )


class _Upload:
    """Small arrays that reach the device as one copy."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._arrays: list[np.ndarray[tuple[int], np.dtype[np.signedinteger]]] = []

    def add(self, array: np.ndarray[tuple[int], np.dtype[np.signedinteger]]) -> None:
        self._arrays.append(array)

    def send(self) -> list[Tensor]:
        joined = torch.from_numpy(np.concatenate(self._arrays)).to(self._dtype)
        if self._device.type != "cpu":
            joined = joined.pin_memory().to(self._device, non_blocking=True)
        return list(torch.split(joined, [len(array) for array in self._arrays]))
