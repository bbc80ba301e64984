"""Tensors of a checkpoint directory: safetensors, one file or many, read slice by slice.

A rank asks for its own rows or columns and nothing else is read from the disk.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.worker.errors import ConfigError
from paceline.worker.parallel.shards import Span

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


def read_checkpoint_dtype(file: Path) -> str:
    """The dtype of a file's first tensor, as torch spells it."""
    with _open(file) as handle:
        for name in handle.keys():  # noqa: SIM118 a safetensors handle cannot be iterated
            code = str(handle.get_slice(name).get_dtype())
            return _DTYPE_NAMES.get(code, code)
    raise ConfigError(f"'{file}' holds no tensors")


class WeightReader:
    """Reads named tensors, converted to one dtype on one device. Use as a context manager."""

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """tensors: what the directory holds, opened already; by default its safetensors files."""
        self.dtype = dtype
        self.device = device
        self._path = Path(path)
        # Any: safetensors has no types for an open file.
        self._by_name: dict[str, Any] = {}
        self._handles: list[Any] = []
        if tensors is not None:
            self._by_name = dict.fromkeys(tensors, _OpenTensors(tensors))
            return
        for file in find_weight_files(self._path):
            handle = _open(file)
            self._handles.append(handle)
            self._by_name |= dict.fromkeys(handle.keys(), handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.__exit__(kind, error, trace)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Span | None = None,
        columns: Span | None = None,
    ) -> Tensor:
        """The tensor `name` of `shape`, or the part of it in `rows` and `columns`.

        Raises: ConfigError: no such tensor, or another shape.
        """
        if name not in self._by_name:
            raise ConfigError(f"the checkpoint in '{self._path}' lacks the tensor '{name}'")
        part = self._by_name[name].get_slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            raise ConfigError(
                f"tensor '{name}' in '{self._path}' has shape {list(found)}, but config.json "
                f"makes it {list(shape)}"
            )
        rows = rows or Span(0, shape[0])
        if columns is None:
            data: Tensor = part[rows.start : rows.stop]
        else:
            data = part[rows.start : rows.stop, columns.start : columns.stop]
        # A copy always: what is read aliases the file, which someone may replace.
        return data.to(
            device=self.device, dtype=self.dtype, copy=True, memory_format=torch.contiguous_format
        )


class _OpenTensors:
    """Tensors in the place of an open file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def get_slice(self, name: str) -> "_TensorSlice":
        return _TensorSlice(self._tensors[name])


class _TensorSlice:
    """One of them, sliced as safetensors slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        return self._tensor[index]


def _open(file: Path) -> Any:  # Any: safetensors has no types for an open file
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"'{file}' is not a safetensors file: {error}") from error


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(k): str(v) for k, v in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"'{index}' is not an index of safetensors: {error!r}") from error
