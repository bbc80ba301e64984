"""store_kv writes its slots and nothing else."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from tests.kernels.rows import i64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "page_size", "head_dim", "num_heads"),
    [(1, 1, 64, 3), (3, 16, 128, 1), (5, 1, 72, 2), (33, 64, 64, 3)],
)
def test_tokens_land_in_their_slots_and_nowhere_else(
    kernels: KernelSet,
    device: str,
    num_tokens: int,
    page_size: int,
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
) -> None:
    num_slots = page_size * (num_tokens + 1)
    caches = torch.randn(2, num_slots, num_heads, head_dim).to(device, dtype)
    before = caches.clone()
    slots = (torch.randperm(num_slots - 1)[:num_tokens] + 1).to(device)
    qkv = torch.randn(num_tokens, (num_heads * 4) * head_dim).to(device, dtype)
    k, v = qkv.view(num_tokens, -1, head_dim)[:, 2 * num_heads :].split(num_heads, 1)
    kernels.store_kv(k, v, caches[0], caches[1], slots)
    assert torch.equal(caches[0][slots], k)
    assert torch.equal(caches[1][slots], v)
    others = torch.ones(num_slots, dtype=torch.bool, device=device)
    others[slots] = False
    assert torch.equal(caches[:, others], before[:, others])


def test_the_cache_may_be_narrower_than_the_step(kernels: KernelSet, device: str) -> None:
    k, v = torch.randn(2, 2, 1, 64, device=device)
    caches = torch.zeros(2, 4, 1, 64, dtype=torch.bfloat16, device=device)
    kernels.store_kv(k, v, caches[0], caches[1], i64([3, 1], device))
    # Interpreted, Triton cuts bits off where others round: up to the last bit of bf16.
    torch.testing.assert_close(caches[0][[3, 1]].float(), k, atol=0, rtol=2**-7)
    torch.testing.assert_close(caches[1][[3, 1]].float(), v, atol=0, rtol=2**-7)


def test_padding_rows_may_share_the_dump_slot(kernels: KernelSet, device: str) -> None:
    k, v = torch.randn(2, 4, 1, 64, device=device)
    caches = torch.zeros(2, 4, 1, 64, device=device)
    kernels.store_kv(k, v, caches[0], caches[1], i64([0, 2, 0, 0], device))
    assert torch.equal(caches[0][2], k[1])
    assert not caches[:, [1, 3]].any()


def test_a_column_of_slots_is_read_as_one_or_refused(kernels: KernelSet, device: str) -> None:
    """It is no dense vector, and those who address memory read it as one."""
    k, v = torch.randn(2, 2, 1, 64, device=device)
    caches = torch.zeros(2, 8, 1, 64, device=device)
    slots = i64([3, 5, 1, 7], device).view(2, 2)[:, 0]
    if kernels.name in ("triton", "sgl"):
        with pytest.raises(ValueError, match="must be dense"):
            kernels.store_kv(k, v, caches[0], caches[1], slots)
        assert not caches.any()
    else:
        kernels.store_kv(k, v, caches[0], caches[1], slots)
        assert torch.equal(caches[0][[3, 1]], k)
        assert not caches[:, [5, 7]].any()


def test_nothing_to_store_is_no_error(kernels: KernelSet, device: str) -> None:
    caches = torch.zeros(2, 4, 1, 64, device=device)
    none = torch.zeros(0, 1, 64, device=device)
    kernels.store_kv(none, none, caches[0], caches[1], i64([], device))
    assert not caches.any()


def test_a_slot_outside_the_cache_is_an_error_on_a_cpu(kernels: KernelSet, device: str) -> None:
    """Compiled or not, nothing else is written to."""
    if kernels.name not in ("reference", "native"):
        return
    k, v = torch.randn(2, 2, 1, 64)
    for slot in (4, -1):
        caches = torch.zeros(2, 6, 1, 64)
        with pytest.raises(IndexError):
            kernels.store_kv(k, v, caches[0, 1:5], caches[1, 1:5], i64([2, slot], device))
        assert not caches[:, [0, 1, 2, 4, 5]].any()


def test_slots_and_caches_need_not_be_dense_on_a_cpu(kernels: KernelSet, device: str) -> None:
    if kernels.name not in ("reference", "native"):
        return
    k, v = torch.randn(2, 2, 1, 64)
    caches = torch.zeros(2, 4, 2, 64)
    slots = i64([3, 0, 1, 0], device)[::2]
    kernels.store_kv(k, v, caches[0, :, :1], caches[1, :, 1:], slots)
    assert torch.equal(caches[0, [3, 1], :1], k)
    assert torch.equal(caches[1, [3, 1], 1:], v)
    assert torch.count_nonzero(caches) == 4 * 64
