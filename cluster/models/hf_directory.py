"""Writes the files of a Hugging Face checkpoint directory, the same bytes for the same input."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def write_weights(out: Path, state: "Mapping[str, Tensor]") -> None:
    from safetensors.torch import save_file

    file = out / "model.safetensors"
    save_file(dict(sorted(state.items())), file, metadata={"format": "pt"})
    file.chmod(0o644)  # save_file makes it 0600, and a cache may be shared


def write_config(out: Path, config: str | Mapping[str, Any], dtype: str) -> None:
    """Any: the values of a config.json are of every type that JSON has."""
    values = json.loads(config) if isinstance(config, str) else dict(config)
    write_json(out / "config.json", {**values, "dtype": dtype, "torch_dtype": dtype})


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    text = json.dumps(values, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
