"""The tensors of an EAGLE head under one set of names, whichever tool wrote the checkpoint.

The names are those of a Llama without `model.` in front; an EAGLE-3 head's one layer is `layers.0`.
"""

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError
from paceline.worker.models.checkpoint_files import find_weight_files

_PICKLED = "pytorch_model.bin"
_PREFIXES = (("model.", ""), ("midlayer.", "layers.0."))
# A fused projection and those it holds, in order.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def open_head(path: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by its one name; on the disk until it is used.

    Raises: ConfigError: no weights, weights that cannot be read, or two tensors of one name.
    """
    stored = _open_pickled(path) if _is_pickled(path) else _open_safetensors(path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        plain = name
        for prefix, instead in _PREFIXES:
            if plain.startswith(prefix):
                plain = instead + plain.removeprefix(prefix)
        if plain in tensors:
            raise ConfigError(
                f"'{path}' holds the tensor '{plain}' twice, once as '{name}'; "
                "keep one and fetch the head again if it came so"
            )
        tensors[plain] = tensor
    return tensors


def split_fused(tensors: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The same with q, k and v apart, and gate and up.

    Raises: ConfigError: a fused projection whose rows are not what config.json makes them.
    """
    found = dict(tensors)
    for name in tensors:
        base, _, kind = name.rpartition(".")
        fused = next((fused for fused in _FUSED if base.endswith(fused)), None)
        if fused is None:
            continue
        tensor = found.pop(name)
        rows = int(tensor.shape[0])
        if fused == "mlp.gate_up_proj":
            sizes = [model.intermediate_size] * 2
        else:
            sizes = [x * model.head_dim for x in (model.num_heads, *[model.num_kv_heads] * 2)]
        if sum(sizes) != rows:
            raise ConfigError(
                f"tensor '{name}' in '{model.path}' has {rows} rows, but config.json makes it "
                f"{' + '.join(map(str, sizes))}"
            )
        layer = base.removesuffix(fused)
        for part, rows_of_part in zip(_FUSED[fused], torch.split(tensor, sizes), strict=True):
            found[f"{layer}{part}.{kind}"] = rows_of_part
    return found


def _is_pickled(path: Path) -> bool:
    has_safetensors = any(path.glob("model.safetensors*"))
    return not has_safetensors and (path / _PICKLED).is_file()


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in find_weight_files(path):
        try:
            with safe_open(file, framework="pt") as handle:
                tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"'{file}' is not a safetensors file: {error}") from error
    return tensors


def _open_pickled(path: Path) -> dict[str, Tensor]:
    """What most heads of EAGLE's authors come as. Tensors alone are read: no code is run."""
    file = path / _PICKLED
    try:
        found = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError) as error:
        raise ConfigError(
            f"'{file}' cannot be read as tensors: {str(error).partition(chr(10))[0] or 'it is cut'}"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise ConfigError(f"'{file}' holds something else than named tensors")
    return {str(name): tensor for name, tensor in found.items()}
