"""Decode and extend attention against fp64, over odd shapes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from tests.kernels.rows import Rows, attend_naively, indptr, make_rows, tree_cells

TREE_A = (-1, 0, 0, 1, 1, 2)
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


def decode(kernels: KernelSet, rows: Rows, scale: float) -> Tensor:
    plan = kernels.plan_attention(None, rows.kv_indptr, rows.kv_indices, kv_lens=rows.kv_lens)
    return kernels.decode_attention(
        rows.q, rows.k_cache, rows.v_cache, rows.kv_indptr, rows.kv_indices, scale, plan=plan
    )


def extend(
    kernels: KernelSet,
    rows: Rows,
    scale: float,
    tree_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
) -> Tensor:
    plan = kernels.plan_attention(
        rows.qo_indptr,
        rows.kv_indptr,
        rows.kv_indices,
        tree_mask,
        mask_indptr,
        q_lens=rows.q_lens,
        kv_lens=rows.kv_lens,
    )
    return kernels.extend_attention(
        rows.q,
        rows.k_cache,
        rows.v_cache,
        rows.qo_indptr,
        rows.kv_indptr,
        rows.kv_indices,
        tree_mask,
        mask_indptr,
        scale,
        plan=plan,
    )


def close(out: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(out.cpu().double(), expected, atol=atol, rtol=atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize(
    ("kv_lens", "page_size", "head_dim", "heads"),
    [
        ((1,), 1, 64, (9, 3)),
        ((5, 130, 64), 16, 128, (4, 4)),
        ((3, 0, 70, 1, 33), 64, 72, (6, 2)),
        ((40, 40), 16, 64, (3, 1)),
    ],
)
def test_decode_attends_over_every_slot_of_its_row(
    kernels: KernelSet,
    device: str,
    kv_lens: tuple[int, ...],
    page_size: int,
    head_dim: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    atol: float,
) -> None:
    rows = make_rows(
        [1] * len(kv_lens),
        kv_lens,
        page_size=page_size,
        head_dim=head_dim,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        dtype=dtype,
        device=device,
    )
    close(decode(kernels, rows, 0.125), attend_naively(rows, 0.125), atol)


def test_decode_takes_33_rows_of_mixed_lengths(kernels: KernelSet, device: str) -> None:
    rows = make_rows([1] * 33, [1 + 7 * (b % 5) for b in range(33)], page_size=16, device=device)
    close(decode(kernels, rows, 0.125), attend_naively(rows, 0.125), 1e-5)


def test_decode_joins_the_shares_of_a_long_row(kernels: KernelSet, device: str) -> None:
    rows = make_rows([1, 1], [700, 3], num_q_heads=2, num_kv_heads=1, head_dim=16, device=device)
    close(decode(kernels, rows, 0.25), attend_naively(rows, 0.25), 1e-5)


def test_attention_without_a_plan_is_the_same(kernels: KernelSet, device: str) -> None:
    rows = make_rows([1], [9], num_q_heads=1, num_kv_heads=1, head_dim=16, device=device)
    tensors = (rows.q, rows.k_cache, rows.v_cache)
    decoded = kernels.decode_attention(*tensors, rows.kv_indptr, rows.kv_indices, 0.25)
    extended = kernels.extend_attention(
        *tensors, rows.qo_indptr, rows.kv_indptr, rows.kv_indices, None, None, 0.25
    )
    close(decoded, attend_naively(rows, 0.25), 1e-5)
    close(extended, attend_naively(rows, 0.25), 1e-5)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "page_size", "head_dim"),
    [
        ((7,), (7,), 1, 64),
        ((40,), (40,), 16, 72),
        ((3, 3, 37), (10, 3, 41), 16, 128),
        ((1, 5, 2), (70, 5, 33), 64, 64),
    ],
)
def test_extend_is_causal_and_aligned_at_the_end(
    kernels: KernelSet,
    device: str,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    atol: float,
) -> None:
    rows = make_rows(
        q_lens, kv_lens, page_size=page_size, head_dim=head_dim, dtype=dtype, device=device
    )
    close(extend(kernels, rows, 0.125), attend_naively(rows, 0.125), atol)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
def test_extend_sees_the_tree_of_a_row_and_its_whole_prefix(
    kernels: KernelSet, device: str, dtype: torch.dtype, atol: float
) -> None:
    # a whole tree, a causal row, and the last two nodes of a tree whose others are cached
    trees = [tree_cells(TREE_A), None, tree_cells(TREE_A)[4:]]
    rows = make_rows((6, 4, 2), (9, 20, 70), page_size=16, dtype=dtype, device=device)
    cells = torch.cat([tree.flatten() for tree in trees if tree is not None]).to(device)
    mask_indptr = indptr([0 if tree is None else tree.numel() for tree in trees], device)
    out = extend(kernels, rows, 0.125, cells, mask_indptr)
    close(out, attend_naively(rows, 0.125, trees), atol)


def test_equal_trees_of_a_batch_do_not_mix(kernels: KernelSet, device: str) -> None:
    trees = [tree_cells(TREE_A), tree_cells((-1, 0, 1, 2, 3, 4)), tree_cells((-1, 0, 0, 0, 0, 0))]
    rows = make_rows((6, 6, 6), (6, 30, 11), device=device)
    cells = torch.cat([tree.flatten() for tree in trees]).to(device)
    out = extend(kernels, rows, 0.125, cells, indptr([36, 36, 36], device))
    close(out, attend_naively(rows, 0.125, trees), 1e-5)


def test_slots_in_line_give_what_scattered_ones_give(device: str, kernels: KernelSet) -> None:
    for lens in ((12,), (12, 30), (4, 4)):
        rows = make_rows((2,) * len(lens), lens, in_line=True, device=device)
        close(extend(kernels, rows, 0.125), attend_naively(rows, 0.125), 1e-5)


def test_a_row_does_not_depend_on_its_neighbours(kernels: KernelSet, device: str) -> None:
    rows = make_rows([1] * 3, [20, 50, 5], device=device)
    together = decode(kernels, rows, 0.125)
    start = 0
    for b, kv_len in enumerate(rows.kv_lens):
        alone = Rows(
            rows.q[b : b + 1],
            rows.k_cache,
            rows.v_cache,
            indptr([1], device),
            indptr([kv_len], device),
            rows.kv_indices[start : start + kv_len],
            (1,),
            (kv_len,),
        )
        close(decode(kernels, alone, 0.125), together[b : b + 1].cpu().double(), 1e-6)
        start += kv_len


def test_stale_slots_outside_a_row_are_never_read(kernels: KernelSet, device: str) -> None:
    rows = make_rows([1, 6], [5, 9], page_size=16, device=device)
    expected = attend_naively(rows, 0.125)
    used = torch.zeros(len(rows.k_cache), dtype=torch.bool, device=device)
    used[rows.kv_indices.long()] = True
    used[0] = True  # padding may read the dump, and multiplies it by zero
    for cache in (rows.k_cache, rows.v_cache):
        cache[~used] = float("nan")
    close(extend(kernels, rows, 0.125), expected, 1e-5)


@pytest.mark.parametrize("q_len", [1, 4])
def test_one_plan_serves_every_layer(kernels: KernelSet, device: str, q_len: int) -> None:
    rows = make_rows([q_len] * 2, [9, 6], device=device)
    plan = kernels.plan_attention(
        rows.qo_indptr, rows.kv_indptr, rows.kv_indices, q_lens=rows.q_lens, kv_lens=rows.kv_lens
    )
    layers = [rows, replace(rows, k_cache=rows.v_cache, v_cache=rows.k_cache)]
    outs = [
        kernels.extend_attention(
            layer.q,
            layer.k_cache,
            layer.v_cache,
            layer.qo_indptr,
            layer.kv_indptr,
            layer.kv_indices,
            None,
            None,
            0.125,
            plan=plan,
        )
        for layer in layers
    ]
    for layer, out in zip(layers, outs, strict=True):
        close(out, attend_naively(layer, 0.125), 1e-5)


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 3, 64), (3, 3, 32)])
def test_disagreeing_heads_are_refused(q_heads: int, kv_heads: int, head_dim: int) -> None:
    from paceline.kernels.checks import check_attention

    cache = torch.zeros(4, kv_heads, 64)
    with pytest.raises(ValueError, match=r"heads|D of the caches"):
        check_attention(torch.zeros(1, q_heads, head_dim), cache, cache)


def test_long_rows_in_line_beside_scattered_ones(kernels: KernelSet, device: str) -> None:
    rows = make_rows([1] * 4, [400, 420, 5, 410], num_q_heads=2, num_kv_heads=1, device=device)
    for start, kv_len in ((0, 400), (825, 410)):
        rows.kv_indices[start : start + kv_len] = torch.arange(3, 3 + kv_len, device=device)
    close(decode(kernels, rows, 0.125), attend_naively(rows, 0.125), 1e-5)
