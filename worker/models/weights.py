"""Tensors of a checkpoint directory: safetensors, one file or many, read slice by slice.

A rank asks for its own rows or columns and nothing else is read from the disk.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from paceline.worker.errors import ConfigError
from paceline.worker.layers.row_tiles import RowTiles
from paceline.worker.models.checkpoint_files import find_weight_files, open_weights
from paceline.worker.parallel.shards import Span


class WeightReader:
    """Reads named tensors, converted to one dtype on one device. Use as a context manager."""

    def __init__(
        self,
        path: str | Path,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        tensors: Mapping[str, Tensor] | None = None,
        tiles: RowTiles | None = None,
    ) -> None:
        """
        Args:
            tensors: what the directory holds, opened already; by default its safetensors files.
            tiles: passed on to what multiplies by the tensors; None lets a row's last bits depend
                on the rows beside it.
        """
        self.tiles = tiles
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
            handle = open_weights(file)
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
