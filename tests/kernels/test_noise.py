"""Noise bits: the specification in plain integers, golden words, and statistics of uniformity."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.noise import noise_bits

M = 0xFFFFFFFF
TOP = 1 << 24


def fmix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & M
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & M
    return x ^ (x >> 16)


def spelled_out(k0: int, k1: int, token_id: int) -> int:
    a = fmix(k1 ^ fmix((k0 + 0x9E3779B9) & M))
    b = fmix(k0 ^ fmix((k1 + 0x7F4A7C15) & M))
    h = ((token_id * 0x9E3779B1) & M) ^ a
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & M
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & M
    h = (h + b) & M
    h = ((h ^ (h >> 15)) * 0x2C1B3C6D) & M
    h = ((h ^ (h >> 12)) * 0x297A2D39) & M
    return h >> 8


# noise_bits of keys (0,0), (1,0), (0,1), (0xDEADBEEF, 0x80000001) at tokens 0, 1, 49151; first
# written 2026-12 from the specification. A change here changes what every seed answers.
GOLDEN = [
    [15124747, 12147673, 4890465],
    [10145371, 8723548, 14658161],
    [15215092, 1799913, 2595125],
    [12741992, 9251036, 6596045],
]

WORDS = st.one_of(st.integers(0, M), st.sampled_from([0, 1, 0x7FFFFFFF, 0x80000000, M]))


@settings(max_examples=100, deadline=None)
@given(k0=WORDS, k1=WORDS, token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_bits_are_those_of_the_specification(k0: int, k1: int, token_ids: list[int]) -> None:
    bits = noise_bits(torch.tensor([[k0, k1]]), torch.tensor([token_ids]))
    assert bits.tolist() == [[spelled_out(k0, k1, token_id) for token_id in token_ids]]


def test_golden_bits_never_change(kernels: KernelSet, device: str) -> None:
    keys = torch.tensor([[0, 0], [1, 0], [0, 1], [0xDEADBEEF, 0x80000001]], device=device)
    ids = torch.tensor([[0, 1, 49151]], device=device).expand(4, 3)
    bits = kernels.noise_bits(keys, ids)
    assert bits.dtype == torch.int64
    assert bits.tolist() == GOLDEN


def test_inputs_are_left_as_they_were(kernels: KernelSet, device: str) -> None:
    keys = torch.tensor([[3, 4]], device=device)
    ids = torch.arange(8, device=device)[None]
    kernels.noise_bits(keys, ids)
    assert keys.tolist() == [[3, 4]]
    assert ids.tolist() == [list(range(8))]


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


def bounded(value: float, num_cells: int) -> bool:
    """Within five standard deviations of a chi-square of num_cells - 1 degrees of freedom."""
    freedom = num_cells - 1
    return abs(value - freedom) < 5 * (2 * freedom) ** 0.5


def grid(seeds: int, positions: int, tokens: int) -> torch.Tensor:
    """[seeds, positions, tokens] bits of the plainest keys there are."""
    keys = torch.cartesian_prod(torch.arange(seeds), torch.arange(positions))
    ids = torch.arange(tokens).expand(len(keys), tokens)
    return noise_bits(keys, ids).view(seeds, positions, tokens)


def test_bits_are_uniform_over_tokens_positions_and_seeds() -> None:
    bits = grid(16, 64, 128)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < TOP
    for cells in ((bits >> 16).flatten(), (bits & 255).flatten(), (bits >> 8 & 255).flatten()):
        assert bounded(chi_square(torch.bincount(cells, minlength=256).double()), 256)


def test_each_bit_is_fair() -> None:
    bits = grid(8, 64, 256).flatten()
    for bit in range(24):
        share = float((bits >> bit & 1).double().mean())
        assert abs(share - 0.5) < 5 * 0.5 / len(bits) ** 0.5


def test_neighbours_in_seed_position_and_token_are_independent() -> None:
    bits = grid(16, 64, 128) >> 20  # 16 levels
    for axis in range(3):
        length = bits.shape[axis] - 1
        pairs = bits.narrow(axis, 0, length) * 16 + bits.narrow(axis, 1, length)
        assert bounded(chi_square(torch.bincount(pairs.flatten(), minlength=256).double()), 256)


def test_the_winning_token_is_uniform_over_positions() -> None:
    winners = grid(4, 4096, 32).view(-1, 32).argmax(-1)
    assert bounded(chi_square(torch.bincount(winners, minlength=32).double()), 32)


def test_one_changed_key_bit_changes_half_of_the_bits() -> None:
    ids = torch.arange(512)[None]
    for base in ((5, 9), (0, 0)):
        before = noise_bits(torch.tensor([base]), ids)
        for word in (0, 1):
            for bit in (0, 7, 31):
                key = list(base)
                key[word] ^= 1 << bit
                changed = (before ^ noise_bits(torch.tensor([key]), ids)).flatten()
                share = sum(int((changed >> b & 1).sum()) for b in range(24)) / (24 * 512)
                assert abs(share - 0.5) < 0.03
