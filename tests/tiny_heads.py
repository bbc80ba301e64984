"""Tiny EAGLE heads for tiny models, in every layout that public checkpoints come in."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import VOCAB_SIZE

Layout = Literal["midlayer", "model.layers", "fused", "bin"]
LAYOUTS: tuple[Layout, ...] = ("midlayer", "model.layers", "fused", "bin")


@dataclass(frozen=True)
class TinyHead:
    """A checkpoint on the disk, and its tensors by their plain names for whoever judges it."""

    path: Path
    config: dict[str, Any]  # Any: parsed JSON
    tensors: dict[str, Tensor]


@dataclass
class HeadSizes:
    """By default those of `make_tiny_model`."""

    hidden_size: int = 72
    target_hidden_size: int = 72
    intermediate_size: int = 96
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 8
    num_layers: int = 1
    extra: dict[str, Any] = field(default_factory=dict)  # Any: what config.json may hold

    def config(self, architecture: str) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": "llama",
            "torch_dtype": "float32",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 128,  # less than its target's, as in public heads
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            **self.extra,
        }


class _Random:
    def __init__(self, seed: int) -> None:
        self._gen = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._gen) * 0.25

    def norm(self, width: int) -> Tensor:
        return 1 + 0.1 * torch.randn(width, generator=self._gen)


def _layer(rand: _Random, sizes: HeadSizes, prefix: str, attention_size: int) -> dict[str, Tensor]:
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    hidden, mlp = sizes.hidden_size, sizes.intermediate_size
    return {
        f"{prefix}.self_attn.q_proj.weight": rand.matrix(q, attention_size),
        f"{prefix}.self_attn.k_proj.weight": rand.matrix(kv, attention_size),
        f"{prefix}.self_attn.v_proj.weight": rand.matrix(kv, attention_size),
        f"{prefix}.self_attn.o_proj.weight": rand.matrix(hidden, q),
        f"{prefix}.mlp.gate_proj.weight": rand.matrix(mlp, hidden),
        f"{prefix}.mlp.up_proj.weight": rand.matrix(mlp, hidden),
        f"{prefix}.mlp.down_proj.weight": rand.matrix(hidden, mlp),
        f"{prefix}.post_attention_layernorm.weight": rand.norm(hidden),
    }


def make_eagle3_head(
    path: Path,
    sizes: HeadSizes | None = None,
    *,
    num_taps: int = 3,
    hot_tokens: Sequence[int] | None = None,
    own_head: bool = True,
    own_embedding: bool = False,
    fc_bias: bool = False,
    layout: Layout = "midlayer",
    seed: int = 7,
) -> TinyHead:
    """num_taps 0: no fc, as where the target's features are as wide as the head."""
    sizes = sizes or HeadSizes()
    rand, hidden = _Random(seed), sizes.hidden_size
    features = num_taps * sizes.target_hidden_size
    config = sizes.config("LlamaForCausalLMEagle3")
    tensors = _layer(rand, sizes, "layers.0", 2 * hidden)
    tensors |= {
        "layers.0.input_layernorm.weight": rand.norm(hidden),
        "layers.0.hidden_norm.weight": rand.norm(hidden),
        "norm.weight": rand.norm(hidden),
    }
    if num_taps:
        tensors["fc.weight"] = rand.matrix(hidden, features)
    if fc_bias:
        tensors["fc.bias"] = rand.matrix(hidden)
    if sizes.extra.get("norm_before_fc"):
        tensors["input_norm.weight"] = rand.norm(features)
    if own_embedding:
        tensors["embed_tokens.weight"] = rand.matrix(VOCAB_SIZE, hidden) * 4
    if hot_tokens is not None:
        config["draft_vocab_size"] = len(hot_tokens)
        ids = torch.tensor(hot_tokens)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    if own_head:
        tensors["lm_head.weight"] = rand.matrix(len(hot_tokens or range(VOCAB_SIZE)), hidden)
    return _write(path, config, tensors, layout)


def make_eagle_head(
    path: Path,
    sizes: HeadSizes | None = None,
    *,
    fc_bias: bool = True,
    layout: Layout = "bin",
    seed: int = 7,
) -> TinyHead:
    sizes = sizes or HeadSizes()
    rand, hidden = _Random(seed), sizes.hidden_size
    tensors: dict[str, Tensor] = {"fc.weight": rand.matrix(hidden, 2 * hidden)}
    if fc_bias:
        tensors["fc.bias"] = rand.matrix(hidden)
    for i in range(sizes.num_layers):
        tensors |= _layer(rand, sizes, f"layers.{i}", hidden)
        if i > 0:
            tensors[f"layers.{i}.input_layernorm.weight"] = rand.norm(hidden)
    return _write(path, sizes.config("LlamaForCausalLMEagle"), tensors, layout)


def _write(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], layout: Layout
) -> TinyHead:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    stored = dict(tensors)
    if layout == "midlayer":
        stored = {name.replace("layers.0.", "midlayer."): x for name, x in stored.items()}
    elif layout == "model.layers":
        bare = ("lm_head", "d2t", "t2d")
        stored = {n if n.startswith(bare) else f"model.{n}": x for n, x in stored.items()}
    elif layout == "fused":
        stored = _fuse(stored)
    if layout == "bin":
        torch.save(stored, path / "pytorch_model.bin")
    else:
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return TinyHead(path, config, tensors)


def _fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = dict(tensors)
    for name in tensors:
        for first, fused, others in (
            ("q_proj", "qkv_proj", ("k_proj", "v_proj")),
            ("gate_proj", "gate_up_proj", ("up_proj",)),
        ):
            if f".{first}." in name:
                parts = [stored.pop(name.replace(first, part)) for part in (first, *others)]
                stored[name.replace(first, fused)] = torch.cat(parts)
    return stored
