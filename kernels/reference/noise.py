"""Counter-based noise: a hash of (key, token id), the same bits on every device and set.

The specification, in arithmetic modulo 2^32 with `>>` a logical shift and `^` exclusive or:

    fmix(x):  x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16
    row words of a key (k0, k1):
        a = fmix(k1 ^ fmix(k0 + 0x9E3779B9))
        b = fmix(k0 ^ fmix(k1 + 0x7F4A7C15))
    bits of token id t:
        h  = (t * 0x9E3779B1) ^ a
        h ^= h >> 16;  h *= 0x85EBCA6B
        h ^= h >> 13;  h *= 0xC2B2AE35
        h += b
        h ^= h >> 15;  h *= 0x2C1B3C6D
        h ^= h >> 12;  h *= 0x297A2D39
        bits = h >> 8                                    24 bits, 0 <= bits < 2^24

Key words need no mixing by the caller: seeds and positions as they are will do. Of token ids and
key words the low 32 bits count.
"""

import torch
from torch import Tensor


def noise_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """24 uniform bits for each token of each row.

    Args:
        keys: [n, 2] int64, two 32-bit words of seed and position.
        token_ids: [n, m] int64; a row of stride 0 (`expand`) is hashed like any other.
    Returns: [n, m] int64.
    """
    a, b = _row_words(keys)
    h = token_ids.to(torch.int32)
    if h.data_ptr() == token_ids.data_ptr():
        h = h.clone()
    tmp = torch.empty_like(h)
    h.mul_(_i32(0x9E3779B1)).bitwise_xor_(a)
    _round(h, tmp, 16, 0x85EBCA6B)
    _round(h, tmp, 13, 0xC2B2AE35)
    h.add_(b)
    _round(h, tmp, 15, 0x2C1B3C6D)
    _round(h, tmp, 12, 0x297A2D39)
    return _shift(h, 8, tmp).to(torch.int64)


def _row_words(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The words a and b of each key, [n, 1] int32."""
    words = _as_i32(keys)  # [n, 2]
    # Scalars, since a GPU would wait for a tensor of constants.
    salted = torch.stack((words[:, 0] + _i32(0x9E3779B9), words[:, 1] + _i32(0x7F4A7C15)), 1)
    mixed = _fmix(words.flip(1).bitwise_xor_(_fmix(salted)))
    return mixed[:, :1], mixed[:, 1:]


def _fmix(x: Tensor) -> Tensor:
    tmp = torch.empty_like(x)
    _round(x, tmp, 16, 0x85EBCA6B)
    _round(x, tmp, 13, 0xC2B2AE35)
    return x.bitwise_xor_(_shift(x, 16, tmp))


def _round(h: Tensor, tmp: Tensor, shift: int, factor: int) -> None:
    h.bitwise_xor_(_shift(h, shift, tmp)).mul_(_i32(factor))


def _shift(h: Tensor, shift: int, out: Tensor) -> Tensor:
    """Logical right shift: torch's keeps the sign, so the bits it drags in are masked off."""
    torch.bitwise_right_shift(h, shift, out=out)
    return out.bitwise_and_((1 << (32 - shift)) - 1)


def _as_i32(x: Tensor) -> Tensor:
    """The low 32 bits of each int64."""
    return x.to(torch.int32)


def _i32(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
