"""The drafts that Paceline ships: int8 rows here, ordinary checkpoints in the cache."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.models.catalog import BuildOrder

if TYPE_CHECKING:
    from torch import Tensor

_DATA = Path(__file__).with_name("data")
_DRAFT, _EAGLE3 = _DATA / "smollm2-135m-draft", _DATA / "smollm2-135m-eagle3"
_TARGET = "smollm2-135m"
# A draft reads and writes its target's tokens, so it has its target's tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def build(order: BuildOrder) -> None:
    """The standalone draft, with the target's tokenizer beside it."""
    _write(order, _DRAFT, _dequantise(order, _DRAFT))
    for name in _TOKENIZER_FILES:
        shutil.copyfile(order.parts[_TARGET] / name, order.out / name)
    order.progress("draft ready", 1.0)


def build_eagle3(order: BuildOrder) -> None:
    """The EAGLE-3 head, as public ones are laid out: d2t in int64, and t2d, which follows from it.

    d2t[j] is how far the target's id lies above the head's id j; t2d marks the ids it can guess.
    """
    import json

    import torch

    state = _dequantise(order, _EAGLE3)
    config = json.loads((_EAGLE3 / "config.json").read_text(encoding="utf-8"))
    offsets = state["d2t"].to(torch.int64)
    hot = torch.zeros(config["vocab_size"], dtype=torch.bool)
    hot[offsets + torch.arange(len(offsets))] = True
    _write(order, _EAGLE3, {**state, "d2t": offsets, "t2d": hot})
    order.progress("head ready", 1.0)


def _dequantise(order: BuildOrder, data: Path) -> "dict[str, Tensor]":
    """W = int8 * scale[:, None]; what has no scale is as it was, in the dtype asked for if real."""
    import torch
    from safetensors.torch import load_file

    order.progress(f"dequantising {data.name}", 0.1)
    stored = load_file(data / "model.int8.safetensors")
    dtype = getattr(torch, order.dtype)
    state = {}
    for name, value in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(f"{name}.scale")
        if scale is not None:
            state[name] = (value.float() * scale[:, None]).to(dtype)
        else:
            state[name] = value.to(dtype) if value.is_floating_point() else value
    return state


def _write(order: BuildOrder, data: Path, state: "dict[str, Tensor]") -> None:
    from paceline.cluster.models.hf_directory import write_config, write_weights

    write_weights(order.out, state)
    write_config(order.out, (data / "config.json").read_text(encoding="utf-8"), order.dtype)
    shutil.copyfile(data / "NOTICE", order.out / "NOTICE")
