"""Slots from free pages: worked vectors, refusals, and lengths of every kind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.alloc import alloc_decode, alloc_extend
from tests.kernels.rows import i32, i64


def test_extend_fills_the_last_page_then_takes_new_ones(kernels: KernelSet, device: str) -> None:
    got = kernels.alloc_extend(
        i32([3, 8, 0], device),
        i32([9, 9, 2], device),
        i64([6, 31, -1], device),
        i64([10, 11, 12, 13], device),
        4,
    )
    assert got is not None
    slots, num_used = got
    assert slots.tolist() == [7, 40, 41, 42, 43, 44, 48, 52, 53]
    assert num_used == 4


def test_decode_takes_a_page_where_one_begins(kernels: KernelSet, device: str) -> None:
    got = kernels.alloc_decode(
        i32([5, 8, 9], device), i64([7, 14, 23], device), i64([10, 11, 12], device), 4
    )
    assert got is not None
    assert got[0].tolist() == [40, 15, 44]
    assert got[1] == 2


def test_too_few_pages_give_nothing_and_change_nothing(kernels: KernelSet, device: str) -> None:
    free = i64([10], device)
    assert (
        kernels.alloc_extend(i32([0], device), i32([9], device), i64([-1], device), free, 4) is None
    )
    assert kernels.alloc_decode(i32([1, 1], device), i64([-1, -1], device), free, 4) is None
    assert free.tolist() == [10]


def test_no_free_page_is_enough_where_none_is_needed(kernels: KernelSet, device: str) -> None:
    none = i64([], device)
    got = kernels.alloc_extend(i32([5], device), i32([8], device), i64([20], device), none, 4)
    assert got is not None
    assert (got[0].tolist(), got[1]) == ([21, 22, 23], 0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("bs", [1, 3, 5, 33])
def test_sets_agree_on_any_batch(kernels: KernelSet, device: str, bs: int, page_size: int) -> None:
    prefix = torch.randint(0, 150, (bs,), dtype=torch.int32)
    seq = prefix + torch.randint(0, 200, (bs,), dtype=torch.int32)
    last = torch.where(
        prefix > 0, 64 * 1000 * (1 + torch.arange(bs)) + (prefix - 1) % page_size, -1
    )
    free = torch.randperm(5000)
    for pages in (free, free[:1]):
        expected = alloc_extend(prefix, seq, last, pages, page_size)
        args = (x.to(device) for x in (prefix, seq, last, pages))
        got = kernels.alloc_extend(*args, page_size)
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert (got[0].tolist(), got[1]) == (expected[0].tolist(), expected[1])


def test_an_extend_past_a_million_tokens_works(kernels: KernelSet, device: str) -> None:
    num_tokens = (1 << 20) + 5
    pages = torch.arange(1, num_tokens // 64 + 2, device=device)
    got = kernels.alloc_extend(
        i32([0], device), i32([num_tokens], device), i64([-1], device), pages, 64
    )
    assert got is not None
    assert torch.equal(got[0], torch.arange(64, 64 + num_tokens, device=device))


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
)
def test_no_slot_is_given_twice_and_each_has_its_offset(
    page_size: int, lens: list[tuple[int, int]]
) -> None:
    prefix = [a for a, _ in lens]
    seq = [a + b for a, b in lens]
    owned = 1000 * page_size
    last = [owned * (b + 1) + (a - 1) % page_size if a else -1 for b, a in enumerate(prefix)]
    got = alloc_extend(i32(prefix), i32(seq), i64(last), torch.arange(1, 200), page_size)
    assert got is not None
    slots, num_used = got
    assert len(set(slots.tolist())) == len(slots)
    offsets = [j % page_size for a, s in zip(prefix, seq, strict=True) for j in range(a, s)]
    assert (slots % page_size).tolist() == offsets
    new_pages = {slot // page_size for slot in slots.tolist() if slot < owned}
    assert new_pages == set(range(1, num_used + 1))


def test_a_decode_is_an_extend_by_one() -> None:
    seq, last, free = i32([1, 17, 18]), i64([-1, 47, 64]), i64([9, 8])
    ours, theirs = alloc_decode(seq, last, free, 16), alloc_extend(seq - 1, seq, last, free, 16)
    assert ours is not None
    assert theirs is not None
    assert ours[0].tolist() == theirs[0].tolist() == [144, 128, 65]
