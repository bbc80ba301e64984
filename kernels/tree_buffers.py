"""Buffers of a batch of trees: how long they must be, and of what."""

import torch
from torch import Tensor

from paceline.kernels.api import TreeMaskMode

_MAX_PACKED = 32


def check_mask_mode(mask_mode: TreeMaskMode, num_nodes: int) -> None:
    """Raises: ValueError: more nodes than there are bits."""
    if mask_mode is TreeMaskMode.QLEN_ONLY_BITPACKING and num_nodes > _MAX_PACKED:
        raise ValueError(
            f"{num_nodes} draft tokens do not fit in {_MAX_PACKED} bits; "
            "use another mask mode or fewer draft tokens"
        )


def make_positions(positions: Tensor | None, seq_lens: Tensor, num_nodes: int) -> Tensor:
    """The buffer given, or a new one of [bs * num_nodes] int64."""
    needed = len(seq_lens) * num_nodes
    if positions is None:
        return torch.empty(needed, dtype=torch.int64, device=seq_lens.device)
    return _long_enough("positions", positions, needed)


def make_mask(
    tree_mask: Tensor | None,
    mask_mode: TreeMaskMode,
    bs: int,
    num_nodes: int,
    seq_lens_sum: int | None,
    device: torch.device,
) -> Tensor:
    """The buffer given, or a new one; its length goes unchecked where seq_lens_sum is unknown.

    Raises: ValueError: the buffer given is too short.
    """
    needed, dtype = bs * num_nodes * num_nodes, torch.bool
    if mask_mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        needed, dtype = bs * num_nodes, packed_dtype(num_nodes)
    elif mask_mode is TreeMaskMode.FULL_MASK:
        needed += num_nodes * (seq_lens_sum or 0)
    if tree_mask is None:
        return torch.empty(needed, dtype=dtype, device=device)
    return _long_enough("tree_mask", tree_mask, needed)


def packed_dtype(num_nodes: int) -> torch.dtype:
    """The least unsigned type with a bit for each node."""
    if num_nodes <= 8:
        return torch.uint8
    return torch.uint16 if num_nodes <= 16 else torch.uint32


def _long_enough(name: str, buffer: Tensor, needed: int) -> Tensor:
    if len(buffer) < needed:
        raise ValueError(f"{name} has {len(buffer)} cells, these trees need {needed}")
    return buffer
