"""The built-in models by name, and how a name or a path becomes a checkpoint directory."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.models.cache import default_cache_dir, ensure_entry, is_intact
from paceline.worker.errors import ConfigError, NotFound

# What is being done, and how much of the whole is: 0 to 1.
Progress = Callable[[str, float], None]

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """What a builder of a built-in model is asked for.

    Args:
        out: an empty directory; the builder fills it.
        dtype: of the weights, one of DTYPES.
        parts: the finished directory of each model it `needs`.
        source: a file of the user's to take the weights from; None: find it or fetch it.
    """

    out: Path
    dtype: str
    parts: Mapping[str, Path]
    source: Path | None
    progress: Progress


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model that can be had by name.

    Args:
        builder: "module:function" of `Callable[[BuildOrder], None]`, imported when it is needed.
        recipe: raised whenever the builder writes something else, so that old caches are rebuilt.
        needs: built-in models this one takes a part from.
        draft: the built-in draft that guesses for this one, which "auto" stands for.
        default_draft: what it is served with unless told: "none", "ngram" or "auto".
    """

    name: str
    description: str
    num_parameters: int
    license: str
    builder: str
    recipe: int = 1
    needs: tuple[str, ...] = ()
    draft: str | None = None
    default_draft: str = "none"


BUILT_IN: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct by Hugging Face, a small chat model",
            num_parameters=134_515_008,
            license="Apache-2.0",
            builder="paceline.cluster.models.smollm2:build",
            draft="smollm2-135m-eagle3",
            default_draft="auto",
        ),
        BuiltIn(
            name="smollm2-135m-draft",
            description="standalone draft for smollm2-135m, shipped with Paceline",
            num_parameters=15_730_944,
            license="Apache-2.0",
            builder="paceline.cluster.models.shipped_draft:build",
            needs=("smollm2-135m",),
        ),
        BuiltIn(
            name="smollm2-135m-eagle3",
            description="EAGLE-3 head for smollm2-135m, shipped with Paceline",
            num_parameters=9_808_128,
            license="Apache-2.0",
            builder="paceline.cluster.models.shipped_draft:build_eagle3",
        ),
    )
}


def resolve_model(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """The checkpoint directory of a built-in name or of the user's own model.

    A built-in name wins over a folder of that name; `./NAME` is the folder.

    Raises:
        NotFound: neither a built-in name nor there.
        ConfigError: there, but not a model that can be served, with the reason.
    """
    if str(name_or_path) in BUILT_IN:
        return get_model(str(name_or_path), progress)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise NotFound(
            f"model '{name_or_path}' is neither built in nor a directory that exists; "
            f"built in are: {', '.join(BUILT_IN)}; or give the path of a Hugging Face directory"
        )
    if not path.is_dir():
        raise ConfigError(
            f"model '{name_or_path}' is not a directory; give the directory that holds config.json "
            "and the safetensors files"
        )
    # In here: a built-in model needs no such check.
    from paceline.worker.models.registry import load_model_config

    load_model_config(path)
    return path.resolve()


def get_model(
    name: str,
    progress: Progress | None = None,
    *,
    dtype: str = "bfloat16",
    source: Path | None = None,
    cache_dir: Path | None = None,
) -> Path:
    """The directory of a built-in model, made now if the cache does not hold it whole.

    Safe to call from several processes at once: one builds, the others wait.

    Args:
        progress: told what is being done; never called when the cache holds the model.
        dtype: of the weights on disk, one of DTYPES.
        source: take the weights from this file instead of finding or fetching them.
        cache_dir: where to keep it; None: `default_cache_dir()`.
    Raises:
        NotFound: no such built-in model.
        ConfigError: a bad dtype or source, or the cache cannot be written.
        Unavailable: the weights could not be fetched.
    """
    path = cached_path(name, dtype=dtype, cache_dir=cache_dir)
    model = BUILT_IN[name]
    report = progress or _silent

    def build(out: Path) -> None:
        parts = {
            part: get_model(part, report, source=source, cache_dir=cache_dir)
            for part in model.needs
        }
        module, _, function = model.builder.partition(":")
        builder: Callable[[BuildOrder], None] = getattr(importlib.import_module(module), function)
        builder(BuildOrder(out, dtype, parts, source, report))

    return ensure_entry(path, model.recipe, build, report)


def cached_path(name: str, *, dtype: str = "bfloat16", cache_dir: Path | None = None) -> Path:
    """Where the cache keeps a built-in model, whether it is there or not.

    Raises:
        NotFound: no such built-in model.
        ConfigError: a bad dtype.
    """
    if name not in BUILT_IN:
        raise NotFound(f"no built-in model is named '{name}'; there are: {', '.join(BUILT_IN)}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is '{dtype}', must be one of: {', '.join(DTYPES)}")
    folder = name if dtype == "bfloat16" else f"{name}.{dtype}"
    return (cache_dir or default_cache_dir()) / folder


def is_cached(name: str, *, dtype: str = "bfloat16", cache_dir: Path | None = None) -> bool:
    """Whether the cache holds a built-in model, whole and of today's recipe."""
    path = cached_path(name, dtype=dtype, cache_dir=cache_dir)
    return is_intact(path, BUILT_IN[name].recipe)


def _silent(_what: str, _fraction: float) -> None:
    pass
