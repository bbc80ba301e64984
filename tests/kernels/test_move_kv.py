"""move_kv reads every source before it writes a target."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from tests.kernels.rows import i64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_moves", "head_dim"), [(1, 64), (3, 72), (33, 128)])
def test_every_cache_moves_alike(
    kernels: KernelSet, device: str, num_moves: int, head_dim: int, dtype: torch.dtype
) -> None:
    caches = list(torch.randn(4, 80, 3, head_dim).to(device, dtype))
    src, tgt = (torch.randperm(80)[:num_moves].to(device) for _ in range(2))
    expected = [cache.clone() for cache in caches]
    for cache, before in zip(expected, caches, strict=True):
        cache[tgt] = before[src]
    kernels.move_kv(caches, src, tgt)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, expected, strict=True))


def test_a_rotation_loses_no_row(kernels: KernelSet, device: str) -> None:
    cache = torch.arange(5.0, device=device).view(5, 1, 1).expand(5, 1, 16).contiguous()
    kernels.move_kv([cache], i64([1, 2, 3, 4, 0], device), i64([0, 1, 2, 3, 4], device))
    assert cache[:, 0, 0].tolist() == [1, 2, 3, 4, 0]


def test_more_rows_than_one_tile_of_a_fused_kernel_could_hold_move_safely(
    kernels: KernelSet, device: str
) -> None:
    n = 300 if (kernels.name, device) == ("triton", "cpu") else 6000  # interpreted, row by row
    cache = torch.arange(float(n), device=device).view(n, 1, 1).clone()
    slots = torch.arange(n, device=device)
    kernels.move_kv([cache], slots[1:], slots[:-1])
    assert cache.flatten().tolist() == [*range(1, n), n - 1]


def test_a_column_of_slots_is_read_as_one_or_refused(kernels: KernelSet, device: str) -> None:
    cache = torch.arange(8.0, device=device).view(8, 1, 1).clone()
    src, tgt = i64([1, 7, 2, 7, 3, 6, 4, 6], device).view(2, 2, 2)[:, :, 0]
    if kernels.name in ("triton", "sgl"):
        with pytest.raises(ValueError, match="must be dense"):
            kernels.move_kv([cache], src, tgt)
        assert cache.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    else:
        kernels.move_kv([cache], src, tgt)
        assert cache.flatten().tolist() == [0, 1, 2, 1, 2, 5, 6, 7]


def test_no_moves_are_no_error(kernels: KernelSet, device: str) -> None:
    cache = torch.ones(2, 1, 16, device=device)
    kernels.move_kv([cache], i64([], device), i64([], device))
    assert cache.all()
