"""RMSNorm, and the table of rotary angles with its scalings."""

import math

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.config import ModelConfig
from paceline.worker.models.weights import WeightReader


class RmsNorm:
    def __init__(
        self, reader: WeightReader, name: str, hidden: int, eps: float, kernels: KernelSet
    ) -> None:
        self._weight = reader.read(name, (hidden,))
        self._eps = eps
        self._norm = kernels.rms_norm
        self._add_norm = kernels.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        return self._norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._add_norm(x, residual, self._weight, self._eps)


def make_cos_sin(config: ModelConfig, num_positions: int, device: str) -> Tensor:
    """[num_positions, head_dim] fp32: the cosines of half the dimensions, then their sines."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), _inv_freq(config))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(device)


def _inv_freq(config: ModelConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)  # [head_dim / 2]
    scaling = dict(config.rope_scaling)
    kind = scaling.get("rope_type", "default")
    if kind == "linear":
        return inv_freq / float(scaling["factor"])
    if kind == "llama3":
        return _scale_llama3(
            inv_freq,
            factor=float(scaling["factor"]),
            low=float(scaling["low_freq_factor"]),
            high=float(scaling["high_freq_factor"]),
            original_len=float(scaling["original_max_position_embeddings"]),
        )
    return inv_freq


def _scale_llama3(
    inv_freq: Tensor, *, factor: float, low: float, high: float, original_len: float
) -> Tensor:
    """Slow waves are stretched by `factor`, fast ones kept, those between blended.

    Source: Llama 3.1's rope scaling, as `rope_type: llama3` of config.json describes it.
    """
    turns = original_len * inv_freq / (2 * math.pi)  # of each wave over the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / factor + keep * inv_freq
