"""The draft model that Paceline ships: int8 rows here, an ordinary checkpoint in the cache."""

import shutil
from pathlib import Path

from paceline.cluster.models.catalog import BuildOrder

_DATA = Path(__file__).with_name("data") / "smollm2-135m-draft"
_TARGET = "smollm2-135m"
# A draft reads and writes its target's tokens, so it has its target's tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)


def build(order: BuildOrder) -> None:
    """Dequantises the shipped rows, W = int8 * scale[:, None], and adds the target's tokenizer."""
    import torch
    from safetensors.torch import load_file

    from paceline.cluster.models.hf_directory import write_config, write_weights

    order.progress("dequantising the shipped draft", 0.1)
    stored = load_file(_DATA / "model.int8.safetensors")
    dtype = getattr(torch, order.dtype)
    state = {}
    for name, value in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(f"{name}.scale")
        full = value.float() if scale is None else value.float() * scale[:, None]
        state[name] = full.to(dtype)
    write_weights(order.out, state)
    write_config(order.out, (_DATA / "config.json").read_text(encoding="utf-8"), order.dtype)
    for name in _TOKENIZER_FILES:
        shutil.copyfile(order.parts[_TARGET] / name, order.out / name)
    shutil.copyfile(_DATA / "NOTICE", order.out / "NOTICE")
    order.progress("draft ready", 1.0)
