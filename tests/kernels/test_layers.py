"""RMSNorm, rotary and activation against the formulas of Llama."""

import pytest
import torch
from torch import Tensor

from paceline.kernels.api import KernelSet

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]


def llama_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 3, 33])
def test_rms_norm_is_llamas(
    kernels: KernelSet, device: str, num_tokens: int, dtype: torch.dtype, atol: float
) -> None:
    x = torch.randn(num_tokens, 576).to(device, dtype)
    weight = torch.randn(576).to(device, dtype)
    out = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, llama_norm(x, weight, 1e-5), atol=atol, rtol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_norm_has_llamas_every_bit(dtype: torch.dtype) -> None:
    from paceline.kernels.reference.norm import rms_norm

    x, weight = torch.randn(33, 576).to(dtype), torch.randn(576).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-5), llama_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
def test_add_rms_norm_gives_the_sum_and_its_norm(
    kernels: KernelSet, device: str, dtype: torch.dtype, atol: float
) -> None:
    x, residual = torch.randn(2, 5, 576).to(device, dtype)
    weight = torch.randn(576).to(device, dtype)
    total = x + residual
    normed, left = kernels.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(left, total)
    torch.testing.assert_close(normed, llama_norm(total, weight, 1e-5), atol=atol, rtol=atol)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' formula; cos, sin [T, D / 2]."""
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.parametrize("is_joint", [True, False])
@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_rotary_is_exactly_llamas_in_fp32(
    kernels: KernelSet,
    device: str,
    head_dim: int,
    num_tokens: int,
    is_gathered: bool,
    is_joint: bool,
) -> None:
    positions = torch.randint(0, 50, (num_tokens,)).to(device)
    angles = torch.outer(torch.arange(50.0), 10000 ** -(torch.arange(head_dim // 2) / 32))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    qkv = torch.randn(num_tokens, 15 * head_dim).to(device)
    q = qkv[:, : 9 * head_dim].view(num_tokens, 9, head_dim)
    k = qkv[:, 9 * head_dim : 12 * head_dim].view(num_tokens, 3, head_dim)
    untouched = qkv[:, 12 * head_dim :].clone()
    if not is_joint:
        q, k = q.clone(), k.clone()
    cos, sin = cos_sin[positions].chunk(2, -1)
    expected = rotate(q, cos, sin), rotate(k, cos, sin)
    if is_gathered:
        out = kernels.apply_rotary(q, k, cos_sin[positions], None)
    else:
        out = kernels.apply_rotary(q, k, cos_sin, positions)
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[1], expected[1])
    assert torch.equal(qkv[:, 12 * head_dim :], untouched)


def test_what_lies_apart_in_memory_is_no_other_value_on_a_cpu(kernels: KernelSet) -> None:
    if kernels.name not in ("reference", "native"):
        return
    x, weight = torch.randn(3, 64), torch.randn(64, 2)[:, 0]
    expected = llama_norm(x, weight, 1e-5)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), expected)
    normed, _ = kernels.add_rms_norm(x, torch.zeros(3, 64), weight, 1e-5)
    torch.testing.assert_close(normed, expected)
    cos_sin, positions = torch.randn(9, 64), torch.tensor([[7, 0], [2, 0], [5, 0]])[:, 0]
    q, k = torch.randn(3, 2, 64), torch.randn(3, 1, 64)
    cos, sin = cos_sin[positions].chunk(2, -1)
    rotated = rotate(q, cos, sin), rotate(k, cos, sin)
    kernels.apply_rotary(q, k, cos_sin, positions)
    torch.testing.assert_close((q, k), rotated)


@pytest.mark.parametrize(("dtype", "atol"), DTYPES)
@pytest.mark.parametrize("width", [1536, 50])
def test_silu_and_mul_gates_the_second_half(
    kernels: KernelSet, device: str, width: int, dtype: torch.dtype, atol: float
) -> None:
    gate_up = torch.randn(3, 2 * width).to(device, dtype)
    gate, up = gate_up.chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.silu_and_mul(gate_up), expected, atol=atol, rtol=atol)
