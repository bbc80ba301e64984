"""Counter-based Gumbel noise: what makes a sampled token a function of (seed, position, logits).

The noise of a token depends on the req's seed, the token's absolute position and its id, on
nothing else: not on the batch, the step, the process or what a draft proposed. `argmax(z + noise)`
over log-probabilities z is a draw from their softmax (the Gumbel-max trick), so whoever holds the
same seed and nearly the same logits draws nearly always the same token.

The integer bits are `KernelSet.noise_bits`; here is the same hash on numpy words, for host rows,
and the one map from bits to floats.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.api import KernelSet

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

NUM_BITS = 24
_RANGE = 1 << NUM_BITS
# In place of a token id: coins of a position, which no token's noise shares.
WALK_COIN = -1  # decides on the children of a node
FINAL_COIN = -2  # draws the token after a path
# u = (bits + 0.5) / 2^24 keeps away from 0 and 1, hence the noise is bounded.
GUMBEL_MIN = float(np.float32(-math.log(-math.log(0.5 / _RANGE))))  # -2.8525
GUMBEL_MAX = float(np.float32(-math.log(-math.log((_RANGE - 0.5) / _RANGE))))  # 17.3287


class NoiseKey(NamedTuple):
    """Two 32-bit words that stand for (seed, position)."""

    high: int
    low: int


def noise_key(seed: int, position: int) -> NoiseKey:
    """The key of the token at an absolute position of a req with this seed (64 bits).

    Output `position` of the splitmix64 generator started at `seed`, so neighbouring seeds and
    positions share nothing. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014.
    """
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 31
    return NoiseKey(x >> 32, x & 0xFFFFFFFF)


def signed_seed(seed: int) -> int:
    """A seed of 64 bits as the int64 of the same bits."""
    return _i64(seed & (2**64 - 1))


def device_noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """`noise_key` of each pair: seeds, positions [n] int64 (a seed's 64 bits) -> [n, 2] int64."""
    x = seeds + (positions + 1) * _i64(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _i64(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _i64(0x94D049BB133111EB)
    x = x ^ _shifted(x, 31)
    return torch.stack((_shifted(x, 32), x & 0xFFFFFFFF), -1)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """A logical right shift, which torch's is not."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _i64(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def host_noise_bits(key: NoiseKey, token_ids: Ids | Words) -> Words:
    """`KernelSet.noise_bits` of one row: 24 bits for each of token_ids [m].

    The hash is specified in `kernels/reference/noise.py`; a test holds the two equal. On numpy's
    own words a vocabulary of 49152 takes 0.08 ms, against 0.19 ms in torch.
    """
    a = _fmix(key.low ^ _fmix((key.high + 0x9E3779B9) & 0xFFFFFFFF))
    b = _fmix(key.high ^ _fmix((key.low + 0x7F4A7C15) & 0xFFFFFFFF))
    h = token_ids.astype(np.uint32)
    shifted = np.empty_like(h)
    h *= np.uint32(0x9E3779B1)
    h ^= np.uint32(a)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= np.right_shift(h, np.uint32(shift), out=shifted)
        h *= np.uint32(factor)
    h += np.uint32(b)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        h ^= np.right_shift(h, np.uint32(shift), out=shifted)
        h *= np.uint32(factor)
    return np.right_shift(h, np.uint32(32 - NUM_BITS), out=h)


def _fmix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def host_gumbel(bits: Words) -> Floats:
    """bits [m] -> noise [m] in [GUMBEL_MIN, GUMBEL_MAX]; fp64 rounded to fp32."""
    u = (bits.astype(np.float64) + 0.5) / _RANGE
    return (-np.log(-np.log(u))).astype(np.float32)


def gumbel(bits: Tensor) -> Tensor:
    """The same map for tensors of any shape on any device."""
    u = (bits.double() + 0.5) / _RANGE
    return (-torch.log(-torch.log(u))).float()


def coins(kernels: KernelSet, seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Uniform numbers in [0, 1), fp32, from (seed, position, purpose) alone; as seeds' shape.

    Args:
        seeds, positions: int64, of one shape.
        purpose: WALK_COIN or FINAL_COIN.
    """
    keys = device_noise_keys(seeds.flatten(), positions.flatten())
    tags = torch.full((len(keys), 1), purpose, dtype=torch.int64, device=seeds.device)
    return (kernels.noise_bits(keys, tags).float() / _RANGE).view(seeds.shape)


def top_perturbed(
    z: Floats, key: NoiseKey, k: int, token_ids: Ids | None = None
) -> tuple[Ids, Floats]:
    """The k tokens with the greatest z + noise, and those sums.

    Equal to sorting the sums of the whole vocabulary by (sum descending, id ascending), yet the
    noise is worked out for few tokens only. A token at distance d below the k-th best sum found so
    far reaches it only with noise of at least d. That is impossible when d > GUMBEL_MAX, and
    otherwise, because -log(-log u) <= -log(1 - u), only when 1 - u <= exp(-d): a comparison of the
    hashed bits, which about k tokens of a vocabulary pass. Only they need logarithms in fp64.

    Args:
        z: [vocab_size] log-probabilities up to a constant; -inf excludes a token, NaN is not
            allowed. At least k are finite.
        token_ids: [vocab_size], the token that each place stands for; None: its number.
    Returns: (places [k] int64, sums [k] fp32), best first.
    """
    # argmax is 20 times quicker than a partition, and the usual case.
    first = z.argmax(0, keepdims=True) if k == 1 else np.argpartition(z, len(z) - k)[len(z) - k :]
    first_ids = first if token_ids is None else token_ids[first]
    reached = (z[first] + host_gumbel(host_noise_bits(key, first_ids))).min()
    # Rounding is monotone, so no token that is left out could have tied with `reached`.
    is_near = z + np.float32(GUMBEL_MAX) >= reached
    # Past a quarter of the vocabulary, gathering costs more than hashing the rest.
    if 4 * np.count_nonzero(is_near) < len(z):
        ids = np.flatnonzero(is_near)
        ids, bits = _within_reach(ids, z[ids], key, reached, token_ids)
    else:
        ids, bits = _within_reach(_all_ids(len(z)), z, key, reached, token_ids)
    sums = z[ids] + host_gumbel(bits)
    order = np.lexsort((ids, -sums))[:k]
    return ids[order], sums[order]


def _within_reach(
    ids: Ids, z: Floats, key: NoiseKey, reached: np.float32, token_ids: Ids | None
) -> tuple[Ids, Words]:
    """The ids whose noise may lift them to `reached`, and their bits."""
    bits = host_noise_bits(key, ids if token_ids is None else token_ids[ids])
    # (2^24 - bits - 0.5) / 2^24 is 1 - u. The slack outweighs all rounding: exp and its argument
    # are right to 1e-5, and one step of the bits is added.
    bound = z - reached
    # Above 0 all are within reach; far above, where the best k are far apart, exp would overflow.
    np.minimum(bound, np.float32(1.0), out=bound)
    np.exp(bound, out=bound)
    bound *= np.float32(_RANGE * 1.0001)
    bound += np.float32(1.0)
    survivors = np.flatnonzero((np.uint32(_RANGE) - bits).astype(np.float32) <= bound)
    return ids[survivors], bits[survivors]


@lru_cache(maxsize=4)
def _all_ids(vocab_size: int) -> Ids:
    ids = np.arange(vocab_size)
    ids.flags.writeable = False
    return ids
