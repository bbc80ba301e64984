"""What is derived of each req after a verify: worked vectors, then any batch."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from paceline.kernels.reference import spec_rows
from tests.kernels.rows import i32, i64


def test_the_last_new_token_of_each_row(kernels: KernelSet, device: str) -> None:
    ids = i64([5, 6, 7, 0, 9, 0, 0, 0], device).view(2, 4)
    assert kernels.fill_new_verified_id(ids, i64([3, 1], device)).tolist() == [7, 9]


def test_new_tokens_stand_before_the_end_of_their_req(kernels: KernelSet, device: str) -> None:
    positions, last = kernels.create_extend_after_decode_spec_info(
        i64([11, 12, 13, 21, 31, 32], device), i32([10, 5, 8], device), i64([3, 1, 2], device)
    )
    assert positions.tolist() == [7, 8, 9, 4, 6, 7]
    assert last.tolist() == [13, 21, 32]


def test_a_finished_req_extends_by_nothing_and_has_grown(kernels: KernelSet, device: str) -> None:
    accept_length, seq_lens = i64([2, 0, 1], device), i32([7, 4, 5], device)
    is_finished = torch.tensor([False, True, False], device=device)
    kept, grown = kernels.create_accept_length_filter(accept_length, is_finished, seq_lens)
    assert kept.tolist() == [3, 0, 2]
    assert grown.tolist() == [10, 5, 7]
    assert accept_length.tolist() == [2, 0, 1]
    assert seq_lens.tolist() == [7, 4, 5]


@pytest.mark.parametrize(
    ("seq_len", "num_nodes", "num_kept", "page_size", "expected"),
    [
        (6, 4, 1, 4, "FFTT"),
        (6, 4, 2, 4, "FFTT"),
        (6, 4, 3, 4, "FFFF"),
        (7, 6, 1, 4, "FTTTTT"),
        (8, 6, 1, 4, "FFFFTT"),
        (8, 6, 5, 4, "FFFFFF"),
        (6, 4, 2, 1, "FFTT"),
    ],
)
def test_the_page_of_the_last_token_kept_stays(
    kernels: KernelSet,
    device: str,
    seq_len: int,
    num_nodes: int,
    num_kept: int,
    page_size: int,
    expected: str,
) -> None:
    evict = torch.tensor([[i >= num_kept for i in range(num_nodes)]] * 2, device=device)
    before = evict.clone()
    aligned = kernels.align_evict_mask_to_page_size(evict, i32([seq_len] * 2, device), page_size)
    assert ["".join("FT"[cell] for cell in row) for row in aligned.tolist()] == [expected] * 2
    assert torch.equal(evict, before)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("bs", [1, 3, 33])
def test_only_whole_pages_behind_the_last_token_are_evicted(
    kernels: KernelSet, device: str, bs: int, page_size: int
) -> None:
    num_nodes = 80
    seq_lens = torch.randint(0, 100, (bs,), dtype=torch.int32)
    kept = torch.randint(1, num_nodes, (bs,))
    evict = torch.arange(num_nodes) >= kept[:, None]
    ours = kernels.align_evict_mask_to_page_size(evict.to(device), seq_lens.to(device), page_size)
    for b in range(bs):
        used = int(seq_lens[b] + kept[b])
        first = -(-used // page_size) * page_size - int(seq_lens[b])
        assert ours[b].tolist() == [i >= first for i in range(num_nodes)]


@pytest.mark.parametrize("bs", [1, 5, 200])
def test_sets_agree_on_any_batch(kernels: KernelSet, device: str, bs: int) -> None:
    if bs > 50 and kernels.name == "triton" and device == "cpu":
        bs = 50  # interpreted
    counts = torch.randint(1, 5, (bs,))
    seq_lens = (counts + torch.randint(0, 50, (bs,))).int()
    ids = torch.randint(0, 1000, (bs, 5))
    flat = torch.randint(0, 1000, (int(counts.sum()),))
    ours = kernels.create_extend_after_decode_spec_info(
        flat.to(device), seq_lens.to(device), counts.to(device)
    )
    expected = spec_rows.create_extend_after_decode_spec_info(flat, seq_lens, counts)
    assert [x.tolist() for x in ours] == [x.tolist() for x in expected]
    naive = [
        int(seq_lens[b]) - int(counts[b]) + i for b in range(bs) for i in range(int(counts[b]))
    ]
    assert ours[0].tolist() == naive
    last = kernels.fill_new_verified_id(ids.to(device), counts.to(device))
    assert last.tolist() == [int(ids[b, counts[b] - 1]) for b in range(bs)]
    finished = torch.rand(bs) < 0.3
    kept, grown = kernels.create_accept_length_filter(
        (counts - 1).to(device), finished.to(device), seq_lens.to(device)
    )
    assert kept.tolist() == (counts * ~finished).tolist()
    assert grown.tolist() == (seq_lens + counts).tolist()


def test_an_empty_batch_is_no_error(kernels: KernelSet, device: str) -> None:
    none = i64([], device)
    no_rows = torch.zeros(0, 4, dtype=torch.bool, device=device)
    assert kernels.fill_new_verified_id(none.view(0, 4), none).shape == (0,)
    assert kernels.create_extend_after_decode_spec_info(none, none, none)[0].shape == (0,)
    assert kernels.create_accept_length_filter(none, none.bool(), none)[1].shape == (0,)
    assert kernels.align_evict_mask_to_page_size(no_rows, none, 4).shape == (0, 4)
