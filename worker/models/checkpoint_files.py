"""The safetensors files of a checkpoint directory: which they are, and whether they can be opened.

Loads no torch, so that a start can be refused before any process of it is there.
"""

import json
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from paceline.worker.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def find_weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, all of them there.

    Raises: ConfigError: none, or one that the index names is missing.
    """
    index = path / _INDEX
    if index.is_file():
        names = sorted(set(_read_weight_map(index).values()))
        for name in names:
            if not (path / name).is_file():
                raise ConfigError(
                    f"'{path}' lacks the shard '{name}', one of {len(names)} that {_INDEX} names; "
                    "fetch the checkpoint again"
                )
        return [path / name for name in names]
    if (path / _SINGLE).is_file():
        return [path / _SINGLE]
    raise ConfigError(f"'{path}' has neither {_SINGLE} nor {_INDEX}; only safetensors are read")


# Any: safetensors has no types for an open file.
def open_weights(file: Path, framework: Literal["pt", "np"] = "pt") -> Any:
    """An open file of tensors; "np" serves to look at names, shapes and dtypes without torch.

    Raises: ConfigError: not a safetensors file, or not a whole one.
    """
    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"'{file}' is not a safetensors file: {error}") from error


def check_weight_files(path: Path) -> None:
    """Reads the header of each file and no tensor.

    Raises: ConfigError: as `find_weight_files` and `open_weights`.
    """
    for file in find_weight_files(path):
        with open_weights(file, "np"):
            pass


def read_checkpoint_dtype(file: Path) -> str:
    """The dtype of a file's first tensor, as torch spells it."""
    with open_weights(file, "np") as handle:
        for name in handle.keys():  # noqa: SIM118 a safetensors handle cannot be iterated
            code = str(handle.get_slice(name).get_dtype())
            return _DTYPE_NAMES.get(code, code)
    raise ConfigError(f"'{file}' holds no tensors")


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(k): str(v) for k, v in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"'{index}' is not an index of safetensors: {error!r}") from error
