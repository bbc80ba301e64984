"""Architecture name → model class, and what a checkpoint directory says of itself.

Reads config.json and generation_config.json only; weights.py reads the tensors. Loads no torch.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError, NotFound
from paceline.worker.models.checkpoint_files import find_weight_files, read_checkpoint_dtype

if TYPE_CHECKING:
    from paceline.worker.models.llama import LlamaModel

# JSON of unknown shape, until it is checked.
Json = dict[str, Any]

# "module:class", imported when a checkpoint asks for it.
_MODELS = {"LlamaForCausalLM": "paceline.worker.models.llama:LlamaModel"}
_DTYPES = ("float32", "bfloat16", "float16")
# rope type -> the numbers it needs, as config.json spells them.
_ROPE_SCALING: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(_MODELS)


def load_model_class(architecture: str) -> "type[LlamaModel]":
    if architecture not in _MODELS:
        raise ConfigError(_unsupported(architecture))
    module, _, name = _MODELS[architecture].partition(":")
    model_class: type[LlamaModel] = getattr(importlib.import_module(module), name)
    return model_class


def load_model_config(
    path: str | Path,
    *,
    max_model_len: int = 0,
    dtype: str = "auto",
    skip_layers: Sequence[int] = (),
) -> ModelConfig:
    """What a Hugging Face directory of a causal language model says of itself.

    Args:
        max_model_len: tokens of prompt and output together; 0 takes all the model can.
        dtype: auto (the checkpoint's own) | float32 | bfloat16 | float16.
        skip_layers: layers to leave out; the rest close ranks.
    Raises:
        NotFound: no such directory.
        ConfigError: not a model that can be served, with the reason.
    """
    path = Path(path)
    config = read_config(path)
    architecture = _architecture(path, config)
    refuse_unsupported(path, config)
    file = find_weight_files(path)[0]
    return parse_model_config(
        path,
        config,
        architecture,
        max_model_len=max_model_len,
        dtype=_dtype(path, config, dtype, file),
        skip_layers=skip_layers,
    )


def read_config(path: Path) -> Json:
    """config.json of a checkpoint directory.

    Raises:
        NotFound: no such directory.
        ConfigError: no such file in it, or not a JSON object.
    """
    if not path.is_dir():
        raise NotFound(f"model directory '{path}' does not exist")
    return _read_json(path / "config.json")


def parse_model_config(
    path: Path,
    config: Json,
    architecture: str,
    *,
    dtype: str,
    max_model_len: int = 0,
    skip_layers: Sequence[int] = (),
) -> ModelConfig:
    """What a Llama's config.json says, checked; also that of a draft head, which is no model."""
    num_layers = read_count(path, config, "num_hidden_layers")
    num_heads = read_count(path, config, "num_attention_heads")
    hidden_size = read_count(path, config, "hidden_size")
    rope_theta, rope_scaling = _rope(path, config)
    generation = path / "generation_config.json"
    return ModelConfig(
        path=str(path),
        architecture=architecture,
        vocab_size=read_count(path, config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_count(path, config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=read_count(path, config, "num_key_value_heads", num_heads),
        head_dim=read_count(path, config, "head_dim", hidden_size // num_heads),
        max_model_len=_max_model_len(path, config, max_model_len),
        num_positions=_num_positions(path, config),
        rms_norm_eps=_read_number(path, config, "rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=_eos_token_ids(
            [_read_json(generation)] if generation.is_file() else [], config
        ),
        bos_token_id=config.get("bos_token_id"),
        dtype=dtype,
        skip_layers=_skip_layers(path, skip_layers, num_layers),
    )


def _read_json(path: Path) -> Json:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"'{path.parent}' has no {path.name}; give the directory of a Hugging Face model"
        ) from None
    except ValueError as error:
        raise ConfigError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"'{path}' holds a {type(data).__name__}, must be an object")
    return data


def _unsupported(architecture: str) -> str:
    return (
        f"architecture '{architecture}' is not supported; supported are: "
        f"{', '.join(supported_architectures())}"
    )


def _architecture(path: Path, config: Json) -> str:
    given = config.get("architectures") or []
    named = [str(name) for name in (given if isinstance(given, list) else [given])]
    for name in named:
        if name in _MODELS:
            return name
    if named and "eagle" in named[0].lower():
        raise ConfigError(
            f"'{path}' is a draft head ({named[0]}), which guesses for a model but is none; give "
            "the model it was trained for"
        )
    if named and not any("CausalLM" in name for name in named):
        raise ConfigError(f"'{path}' is not a causal language model: {_unsupported(named[0])}")
    raise ConfigError(f"'{path}': {_unsupported(named[0] if named else 'none given')}")


def refuse_unsupported(path: Path, config: Json) -> None:
    """Raises: ConfigError: quantized weights, or another activation than SiLU."""
    if config.get("quantization_config"):
        raise ConfigError(f"'{path}' is quantized, which is not supported; use a plain checkpoint")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"'{path}' has hidden_act '{activation}'; supported is: silu")


def read_count(path: Path, config: Json, key: str, default: int | None = None) -> int:
    """A whole number above 0.

    Raises: ConfigError: another value, or none and no default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"'{path / 'config.json'}': {key} is {value!r}, must be a positive count")
    return value


def _read_number(path: Path, config: Json, key: str, default: float) -> float:
    """A number above 0; the default where there is none."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"'{path / 'config.json'}': {key} is {value!r}, must be above 0")
    return float(value)


def _read_object(path: Path, config: Json, key: str) -> Json:
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"'{path / 'config.json'}': {key} is {value!r}, must be an object")
    return value


def _num_positions(path: Path, config: Json) -> int:
    return read_count(path, config, "max_position_embeddings", 2048)


def _max_model_len(path: Path, config: Json, wanted: int) -> int:
    limit = _num_positions(path, config)
    if not 0 <= wanted <= limit:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model in '{path}' has {limit} positions; "
            f"use 1 to {limit}, or 0 for all"
        )
    return wanted or limit


def _rope(path: Path, config: Json) -> tuple[float, tuple[tuple[str, float | str], ...]]:
    """(theta, scaling), spelled `rope_parameters` or `rope_theta` and `rope_scaling`."""
    newer = _read_object(path, config, "rope_parameters")
    scaling = _read_object(path, config, "rope_scaling") or newer
    older_theta = _read_number(path, config, "rope_theta", 10000.0)
    theta = _read_number(path, newer, "rope_theta", older_theta)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in _ROPE_SCALING:
        raise ConfigError(
            f"'{path}' has rope scaling '{kind}'; supported are: {', '.join(_ROPE_SCALING)}"
        )
    if kind == "default":
        return theta, ()
    numbers: list[tuple[str, float | str]] = [("rope_type", kind)]
    for key in _ROPE_SCALING[kind]:
        value = scaling.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"'{path}': rope scaling '{kind}' has {key} {value!r}, must be > 0")
        numbers.append((key, float(value)))
    return theta, tuple(numbers)


def _eos_token_ids(generation: list[Json], config: Json) -> tuple[int, ...]:
    """What either file names, once each: chat models list several."""
    ids: dict[int, None] = {}
    for source in [*generation, config]:
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids |= dict.fromkeys(v for v in values if isinstance(v, int))
    return tuple(ids)


def _dtype(path: Path, config: Json, wanted: str, weights: Path) -> str:
    if wanted != "auto":
        if wanted not in _DTYPES:
            raise ConfigError(f"dtype is '{wanted}', must be one of: auto, {', '.join(_DTYPES)}")
        return wanted
    named = config.get("dtype") or config.get("torch_dtype") or read_checkpoint_dtype(weights)
    dtype = str(named).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ConfigError(
            f"'{path}' has dtype '{dtype}'; set dtype to one of: {', '.join(_DTYPES)}"
        )
    return dtype


def _skip_layers(path: Path, wanted: Sequence[int], num_layers: int) -> tuple[int, ...]:
    layers = tuple(sorted(set(wanted)))
    if layers and (layers[0] < 0 or layers[-1] >= num_layers):
        raise ConfigError(
            f"skip_layers is {list(layers)}, but '{path}' has layers 0 to {num_layers - 1}"
        )
    if len(layers) == num_layers:
        raise ConfigError(f"skip_layers leaves out all {num_layers} layers of '{path}'")
    return layers
