"""Slots between flat lists and req_to_token: worked vectors, then random rows."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from tests.kernels.rows import i32, i64


def test_pieces_of_a_flat_list_go_into_rows(kernels: KernelSet, device: str) -> None:
    table = torch.zeros(3, 8, dtype=torch.int32, device=device)
    kernels.assign_req_to_token_pool(
        table,
        i64([2, 0], device),
        i32([3, 1], device),
        i32([6, 3], device),
        i64([50, 51, 52, 60, 61], device),
    )
    assert table.tolist() == [
        [0, 60, 61, 0, 0, 0, 0, 0],
        [0] * 8,
        [0, 0, 0, 50, 51, 52, 0, 0],
    ]


def test_rows_come_back_as_the_flat_list_they_were(kernels: KernelSet, device: str) -> None:
    table = torch.zeros(3, 8, dtype=torch.int32, device=device)
    table[2, 3:6] = i32([50, 51, 52], device)
    table[0, 1:3] = i32([60, 61], device)
    out = kernels.assign_extend_cache_locs(
        table, i64([2, 0], device), i32([3, 1], device), i32([6, 3], device), 5
    )
    assert out.dtype == torch.int64
    assert out.tolist() == [50, 51, 52, 60, 61]


@pytest.mark.parametrize("bs", [1, 3, 5, 33])
def test_any_batch_survives_the_round_trip(kernels: KernelSet, device: str, bs: int) -> None:
    table = torch.zeros(bs + 1, 900, dtype=torch.int32, device=device)
    rows = torch.randperm(bs + 1)[:bs].to(device)
    starts = torch.randint(0, 300, (bs,), dtype=torch.int32, device=device)
    ends = starts + torch.randint(0, 600, (bs,), dtype=torch.int32, device=device)
    total = int((ends - starts).sum())
    flat = torch.randint(1, 2**31 - 1, (total,), device=device)
    kernels.assign_req_to_token_pool(table, rows, starts, ends, flat)
    assert torch.equal(kernels.assign_extend_cache_locs(table, rows, starts, ends, total), flat)
    assert int((table != 0).sum()) == total


def test_branches_on_pages_repeat_the_partial_page(kernels: KernelSet, device: str) -> None:
    table = torch.zeros(1, 24, dtype=torch.int32, device=device)
    table[0, :6] = torch.arange(4, 10)
    borrowed = torch.arange(10, 24, device=device)
    before = borrowed.clone()
    out = kernels.assign_draft_cache_locs(
        table,
        i64([0], device),
        i32([6], device),
        i64([14], device),
        i64([2], device),
        borrowed,
        2,
        3,
        4,
    )
    assert out.tolist() == [10, 11, 12, 18, 19, 20]
    row = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 18, 19, 20, 21, 22, 23]
    assert table[0, :20].tolist() == row
    assert torch.equal(borrowed, before)


@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (1, 16), (4, 1)])
def test_branches_in_line_fill_the_row_in_order(
    kernels: KernelSet, device: str, topk: int, page_size: int
) -> None:
    table = torch.zeros(2, 40, dtype=torch.int32, device=device)
    slots = torch.arange(100, 100 + 2 * topk * 3, device=device)
    unused = i64([1], device)
    out = kernels.assign_draft_cache_locs(
        table,
        i64([1, 0], device),
        i32([5, 9], device),
        unused,
        unused,
        slots,
        topk,
        3,
        page_size,
    )
    assert torch.equal(out, slots)
    assert table[1, 5 : 5 + topk * 3].tolist() == slots[: topk * 3].tolist()
    assert table[0, 9 : 9 + topk * 3].tolist() == slots[topk * 3 :].tolist()


@pytest.mark.parametrize("bs", [3, 64])
def test_branches_of_a_batch_follow_the_closed_form(
    kernels: KernelSet, device: str, bs: int
) -> None:
    page_size, topk, num_steps = 16, 4, 5
    lens = torch.randint(0, 200, (bs,))
    pages = (lens % page_size + num_steps + page_size - 1) // page_size
    extend_lens = pages * page_size * topk - lens % page_size
    slots = torch.randperm(int(extend_lens.sum())) + 1000
    firsts = (extend_lens.cumsum(0) - extend_lens).tolist()
    expected = [
        int(slots[first + branch * num_pages * page_size + step])
        for first, num_pages in zip(firsts, pages.tolist(), strict=True)
        for branch in range(topk)
        for step in range(num_steps)
    ]
    table = torch.zeros(bs, 500, dtype=torch.int32, device=device)
    rows = torch.arange(bs, device=device)
    for _ in range(1000):  # a race would show in some
        out = kernels.assign_draft_cache_locs(
            table,
            rows,
            lens.int().to(device),
            extend_lens.to(device),
            pages.to(device),
            slots.to(device),
            topk,
            num_steps,
            page_size,
        )
        assert out.tolist() == expected
        if device == "cpu":
            break


def test_accepted_nodes_move_to_the_head_of_their_slots(kernels: KernelSet, device: str) -> None:
    slots = [10, 11, 12, 13, 16, 17, 22, 23, 28, 29, 30, 31]
    src, tgt, freed = kernels.get_src_tgt_cache_loc(
        i64(slots, device),
        i64([0, 2, 5, -1, 6, -1, -1, -1], device).view(2, 4),
        i64([2, 0], device),
        i32([6, 2], device),
        6,
        4,
    )
    assert src.tolist() == [10, 12, 17, 22]
    assert tgt.tolist() == [10, 11, 12, 22]
    assert freed.tolist() == [28, 29, 30, 31]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("bs", [1, 5, 33])
def test_what_is_kept_and_freed_is_disjoint_and_whole_pages(
    kernels: KernelSet, device: str, bs: int, page_size: int
) -> None:
    num_nodes = 6
    lens = torch.randint(0, 100, (bs,), dtype=torch.int32)
    accepted = torch.randint(0, 4, (bs,))
    paths = torch.full((bs, 4), -1)
    for b in range(bs):
        nodes = [0, *sorted((torch.randperm(num_nodes - 1)[: accepted[b]] + 1).tolist())]
        paths[b, : len(nodes)] = i64(nodes) + b * num_nodes
    slots = torch.arange(bs * num_nodes) + 500
    src, tgt, freed = kernels.get_src_tgt_cache_loc(
        slots.to(device),
        paths.to(device),
        accepted.to(device),
        lens.to(device),
        num_nodes,
        page_size,
    )
    assert src.tolist() == [500 + node for node in paths.flatten().tolist() if node >= 0]
    expected_tgt: list[int] = []
    expected_freed: list[int] = []
    for b in range(bs):
        length, kept = int(lens[b]), int(accepted[b]) + 1
        keep_len = min(-(-(length + kept) // page_size) * page_size, length + num_nodes) - length
        own = slots[b * num_nodes : (b + 1) * num_nodes].tolist()
        expected_tgt += own[:kept]
        expected_freed += own[keep_len:]
    assert tgt.tolist() == expected_tgt
    assert freed.tolist() == expected_freed
