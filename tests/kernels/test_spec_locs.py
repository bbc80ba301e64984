"""Slots of draft lanes and accepted nodes: worked vectors, then any batch."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from tests.kernels.rows import i32, i64


def test_accepted_slots_come_without_gaps(kernels: KernelSet, device: str) -> None:
    paths = i64([0, 2, 5, -1, 6, -1, -1, -1], device).view(2, 4)
    slots = torch.arange(100, 112, device=device)
    out = kernels.fill_accepted_out_cache_loc(paths, slots)
    assert out.tolist() == [100, 102, 105, 106, 0, 0, 0, 0]


@pytest.mark.parametrize(("bs", "width"), [(1, 9), (5, 2), (33, 4)])
def test_paths_may_be_wider_or_narrower_than_trees(
    kernels: KernelSet, device: str, bs: int, width: int
) -> None:
    num_nodes = 6
    paths = torch.where(torch.rand(bs, width) < 0.5, -1, torch.randint(0, num_nodes, (bs, width)))
    paths = torch.where(paths < 0, -1, paths + torch.arange(bs)[:, None] * num_nodes)
    slots = torch.randperm(bs * num_nodes) + 1
    out = kernels.fill_accepted_out_cache_loc(paths.to(device), slots.to(device))
    expected = [int(slots[node]) for node in paths.flatten().tolist() if node >= 0]
    assert out.tolist() == expected + [0] * (bs * width - len(expected))


def test_finished_reqs_drop_out(kernels: KernelSet, device: str) -> None:
    out = kernels.filter_finished_cache_loc(
        i64([1, 2, 3, 4, 5, 6], device), i64([2, 0, 1], device), i64([3, 0, 2], device), 5
    )
    assert out.tolist() == [1, 2, 3, 5, 6]


@pytest.mark.parametrize("bs", [1, 3, 33])
def test_any_prefix_of_each_reqs_slots_is_kept(kernels: KernelSet, device: str, bs: int) -> None:
    accept_length = torch.randint(0, 6, (bs,))
    kept = torch.minimum(torch.randint(0, 7, (bs,)), accept_length + 1)
    slots = torch.arange(int((accept_length + 1).sum())) + 50
    pieces = slots.split((accept_length + 1).tolist())
    expected = [s for b in range(bs) for s in pieces[b][: kept[b]].tolist()]
    out = kernels.filter_finished_cache_loc(
        slots.to(device), accept_length.to(device), kept.to(device), len(expected)
    )
    assert out.tolist() == expected


def test_draft_slots_of_a_row_are_read_in_line(kernels: KernelSet, device: str) -> None:
    table = torch.zeros(3, 12, dtype=torch.int32, device=device)
    table[2] = torch.arange(100, 112)
    table[0] = torch.arange(200, 212)
    before = table.clone()
    out = kernels.get_draft_cache_locs(table, i64([2, 0], device), i32([3, 5], device), 2, 2, 1)
    assert out.dtype == torch.int64
    assert out.tolist() == [103, 104, 105, 106, 205, 206, 207, 208]
    assert torch.equal(table, before)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("bs", "topk", "num_steps"), [(1, 1, 3), (3, 4, 5), (33, 2, 1), (2, 8, 20)]
)
def test_draft_slots_are_those_that_were_assigned(
    kernels: KernelSet, device: str, bs: int, topk: int, num_steps: int, page_size: int
) -> None:
    lens = torch.randint(0, 200, (bs,))
    pages = (lens % page_size + num_steps + page_size - 1) // page_size
    is_paged = page_size > 1 and topk > 1
    extend_lens = pages * page_size * topk - lens % page_size
    num_slots = int(extend_lens.sum()) if is_paged else bs * topk * num_steps
    slots = (torch.randperm(num_slots) + 1000).to(device)
    table = torch.zeros(bs, 1400, dtype=torch.int32, device=device)
    rows = torch.randperm(bs).to(device)
    assigned = kernels.assign_draft_cache_locs(
        table,
        rows,
        lens.int().to(device),
        extend_lens.to(device),
        pages.to(device),
        slots,
        topk,
        num_steps,
        page_size,
    )
    read = kernels.get_draft_cache_locs(
        table, rows, lens.int().to(device), topk, num_steps, page_size
    )
    assert torch.equal(read, assigned)


def test_an_empty_batch_is_no_error(kernels: KernelSet, device: str) -> None:
    none = i64([], device)
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    assert kernels.fill_accepted_out_cache_loc(none.view(0, 3), none).shape == (0,)
    assert kernels.filter_finished_cache_loc(none, none, none, 0).shape == (0,)
    assert kernels.get_draft_cache_locs(table, none, none, 2, 3, 1).shape == (0,)
