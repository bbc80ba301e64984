"""The noise of a token: equal bits everywhere, one map to floats, known bounds."""

import numpy as np
import pytest
import torch

from paceline.kernels.registry import load_kernels
from paceline.worker.noise import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    NoiseKey,
    gumbel,
    host_gumbel,
    host_noise_bits,
    noise_key,
    top_perturbed,
)

KEYS = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 131_071), (0x123456789ABCDEF, 77)]


@pytest.mark.parametrize(("seed", "position"), KEYS)
def test_host_bits_equal_those_of_the_kernel_set(seed: int, position: int) -> None:
    key = noise_key(seed, position)
    token_ids = torch.arange(49_152)
    bits = load_kernels("reference", "cpu").noise_bits(torch.tensor([key]), token_ids[None])
    assert np.array_equal(bits[0].numpy(), host_noise_bits(key, token_ids.numpy()))


def test_keys_are_those_of_splitmix64() -> None:
    """The first outputs of the generator for seed 1234567, as its authors' code prints them."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [noise_key(1234567, i) for i in range(3)] == [
        NoiseKey(x >> 32, x & 0xFFFFFFFF) for x in outputs
    ]


def test_neighbouring_seeds_and_positions_have_different_keys() -> None:
    keys = {noise_key(seed, position) for seed in range(100) for position in range(100)}
    assert len(keys) == 10_000


def test_noise_is_bounded_by_the_stated_limits() -> None:
    bits = np.array([0, 1, 2**24 - 2, 2**24 - 1], dtype=np.uint32)
    noise = host_gumbel(bits)
    assert noise.dtype == np.float32
    assert noise[0] == GUMBEL_MIN
    assert noise[-1] == GUMBEL_MAX
    assert list(noise) == sorted(noise)


def test_host_and_tensor_noise_are_equal() -> None:
    bits = np.random.default_rng(0).integers(0, 2**24, 100_000).astype(np.uint32)
    expected = gumbel(torch.from_numpy(bits.astype(np.int64))).numpy()
    assert np.array_equal(host_gumbel(bits), expected)


def test_noise_has_the_moments_of_a_gumbel_variable() -> None:
    token_ids = np.arange(2_000)
    noise = np.concatenate(
        [host_gumbel(host_noise_bits(noise_key(5, i), token_ids)) for i in range(100)]
    )
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("k", [1, 3])
def test_the_best_are_found_however_far_apart_they_are(k: int) -> None:
    z = np.array([0, -50, -1e3, -1e6, -1e36, -np.inf] + [-2e36] * 90, dtype=np.float32)
    ids, sums = top_perturbed(z, noise_key(7, 5), k)
    assert ids.tolist() == [0, 1, 2][:k]
    assert np.isfinite(sums).all()
