"""kv_indices of prefixes and of draft lanes: worked vectors, then random rows."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from tests.kernels.rows import i32, i64, indptr


@pytest.mark.parametrize("bs", [1, 3, 5, 33])
@pytest.mark.parametrize("has_starts", [True, False])
def test_kv_indices_are_the_rows_slots(
    kernels: KernelSet, device: str, bs: int, has_starts: bool
) -> None:
    table = torch.randint(1, 10_000, (bs + 2, 700), dtype=torch.int32)
    rows = torch.randperm(bs + 2)[:bs]
    lens = torch.randint(0, 600, (bs,)).tolist()
    starts = torch.randint(0, 100, (bs,)).tolist() if has_starts else [0] * bs
    out = torch.full((sum(lens) + 3,), -7, dtype=torch.int32, device=device)
    kernels.create_kv_indices(
        table.to(device),
        rows.to(device),
        i32(lens, device),
        indptr(lens, device),
        i32(starts, device) if has_starts else None,
        out,
    )
    expected = [
        slot
        for row, start, length in zip(rows.tolist(), starts, lens, strict=True)
        for slot in table[row, start : start + length].tolist()
    ]
    assert out.tolist() == [*expected, -7, -7, -7]


def test_lanes_of_single_token_pages(kernels: KernelSet, device: str) -> None:
    table = torch.stack((torch.arange(100, 120), torch.arange(200, 220))).int().to(device)
    indices, starts = kernels.generate_draft_decode_kv_indices(
        table, i64([0, 1], device), i32([3, 2], device), 1, 2, 2
    )
    assert starts.tolist() == [[0, 4, 8, 11, 14], [0, 5, 10, 14, 18]]
    first = [100, 101, 102, 103, 100, 101, 102, 105, 200, 201, 202, 200, 201, 204]
    assert indices[0, :14].tolist() == first
    second = [100, 101, 102, 103, 104, 100, 101, 102, 105, 106]
    assert indices[1, :18].tolist() == [*second, 200, 201, 202, 203, 200, 201, 204, 205]


def test_lanes_of_larger_pages_begin_on_pages_of_their_own(kernels: KernelSet, device: str) -> None:
    row = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 18, 19, 20, 21, 22, 23]
    indices, starts = kernels.generate_draft_decode_kv_indices(
        i32(row, device).view(1, -1), i64([0], device), i32([6], device), 4, 2, 3
    )
    prefix = [4, 5, 6, 7, 8, 9]
    assert starts.tolist() == [[0, 7, 14], [0, 8, 16], [0, 9, 18]]
    assert indices[0, :14].tolist() == [*prefix, 10, *prefix, 18]
    assert indices[1, :16].tolist() == [*prefix, 10, 11, *prefix, 18, 19]
    assert indices[2, :18].tolist() == [*prefix, 10, 11, 12, *prefix, 18, 19, 20]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("topk", [1, 3])
def test_lanes_agree_with_the_reference(
    kernels: KernelSet, device: str, topk: int, page_size: int
) -> None:
    from paceline.kernels.reference.kv_indices import generate_draft_decode_kv_indices

    table = torch.randint(1, 10_000, (5, 600), dtype=torch.int32)
    rows, lens = i64([4, 0, 3]), i32([17, 0, 150])
    expected = generate_draft_decode_kv_indices(table, rows, lens, page_size, topk, 3)
    ours = kernels.generate_draft_decode_kv_indices(
        table.to(device), rows.to(device), lens.to(device), page_size, topk, 3
    )
    assert [x.tolist() for x in ours] == [x.tolist() for x in expected]
