"""Random rows of a KV pool, and attention over them in plain fp64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def i32(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def i64(values: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def indptr(lens: Sequence[int], device: str = "cpu") -> Tensor:
    """[n + 1] int32 row starts."""
    return i32([0, *lens], device).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True)
class Rows:
    """Queries and slots of a few reqs, each with `num_pages` scattered pages of its own."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


def make_rows(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    page_size: int = 1,
    head_dim: int = 64,
    num_q_heads: int = 9,
    num_kv_heads: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    in_line: bool = False,
) -> Rows:
    num_pages = sum(-(-kv_len // page_size) for kv_len in kv_lens)
    order = torch.arange(num_pages) if in_line else torch.randperm(num_pages)
    pages = iter((order + 1).tolist())  # page 0 is the dump
    slots: list[int] = []
    for kv_len in kv_lens:
        own = [next(pages) for _ in range(-(-kv_len // page_size))]
        slots += [own[j // page_size] * page_size + j % page_size for j in range(kv_len)]
    shape = ((num_pages + 1) * page_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.randn(2, *shape).to(dtype).to(device)
    # as a model has it: queries are a view of a wider projection
    projected = torch.randn(sum(q_lens), (num_q_heads + 2 * num_kv_heads) * head_dim)
    q = projected.to(dtype).to(device)[:, : num_q_heads * head_dim]
    return Rows(
        q.view(-1, num_q_heads, head_dim),
        k_cache,
        v_cache,
        indptr(q_lens, device),
        indptr(kv_lens, device),
        i32(slots, device),
        tuple(q_lens),
        tuple(kv_lens),
    )


def attend_naively(
    rows: Rows, scale: float, trees: Sequence[Tensor | None] | None = None
) -> Tensor:
    """[T, Hq, D] fp64 on the CPU; trees[b] bool [q_len, tree_len] over the last keys, or causal."""
    q = rows.q.cpu().double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    slots = rows.kv_indices.cpu().long().split(rows.kv_lens)
    start = 0
    for b, (q_len, kv_len) in enumerate(zip(rows.q_lens, rows.kv_lens, strict=True)):
        end = start + q_len
        if q_len and kv_len:
            group = q.shape[1] // rows.k_cache.shape[1]
            k, v = (
                cache.cpu()[slots[b]].double().repeat_interleave(group, 1)
                for cache in (rows.k_cache, rows.v_cache)
            )
            seen = torch.ones(q_len, kv_len, dtype=torch.bool)
            tree = None if trees is None else trees[b]
            if tree is None:
                seen = seen.tril(kv_len - q_len)
            else:
                seen[:, kv_len - tree.shape[1] :] = tree
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k) * scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
        start = end
    return out


def tree_cells(parents: Sequence[int]) -> Tensor:
    """[n, n] bool: node i sees its ancestors and itself; parents[i] < i, -1 for the root."""
    n = len(parents)
    cells = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            cells[node] |= cells[parent]
    return cells
