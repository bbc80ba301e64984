"""Linear layers, each reading its own shard: column, row, QKV, and the merged gate and up.

Column-parallel layers leave each rank with its part of the output; a row-parallel layer takes
such a part and sums over ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from paceline.worker.layers.row_tiles import RowTiles
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.shards import HeadShard, Span


class Linear:
    """x [T, in] -> x W^T + b, [T, out].

    On a CPU the weight is kept in oneDNN's blocked layout: on 2 threads of a Xeon with AMX, bf16,
    the 120 projections of a 135M model take 9.8 ms instead of 16.2 (1 row) and 12 instead of 17
    (8 rows), its 49152-row head 1.07 ms instead of 1.86.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, tiles: RowTiles | None = None
    ) -> None:
        """tiles: a row's bits must not depend on the number of rows, nor on its place."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight) if self._is_packed else weight
        )
        self._tile = None
        if tiles is not None:
            self._tile = tiles.find(Linear, weight.shape, weight.dtype, has_bias=bias is not None)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x) if self._tile is None else self._tile.run(self._multiply, x)

    def _multiply(self, x: Tensor) -> Tensor:
        if self._is_packed:
            y: Tensor = _packed_linear(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)


class RowLinear(Linear):
    """x [T, this rank's in] -> the sum over ranks, [T, out]."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        collective: Collective,
        tiles: RowTiles | None = None,
    ) -> None:
        super().__init__(weight, bias if collective.tp_rank == 0 else None, tiles)
        self._collective = collective if collective.tp_size > 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        return y if self._collective is None else self._collective.all_reduce(y)


def load_column(
    reader: WeightReader,
    names: Sequence[str],
    out_features: int,
    in_features: int,
    rows: Span,
    *,
    bias: bool,
) -> Linear:
    """The same `rows` of several projections of one input, merged into one product."""
    parts = [reader.read(f"{n}.weight", (out_features, in_features), rows=rows) for n in names]
    biases = [reader.read(f"{n}.bias", (out_features,), rows=rows) for n in names] if bias else []
    return Linear(torch.cat(parts), torch.cat(biases) if bias else None, reader.tiles)


def load_qkv(
    reader: WeightReader,
    prefix: str,
    heads: HeadShard,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    in_features: int,
    *,
    bias: bool,
) -> Linear:
    """This rank's query heads, then its K heads, then its V heads, in one product."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for name, total, span in (
        ("q_proj", num_heads, heads.queries),
        ("k_proj", num_kv_heads, heads.kvs),
        ("v_proj", num_kv_heads, heads.kvs),
    ):
        rows = Span(span.start * head_dim, span.stop * head_dim)
        shape = (total * head_dim, in_features)
        weights.append(reader.read(f"{prefix}.{name}.weight", shape, rows=rows))
        if bias:
            biases.append(reader.read(f"{prefix}.{name}.bias", shape[:1], rows=rows))
    return Linear(torch.cat(weights), torch.cat(biases) if bias else None, reader.tiles)


def load_row(
    reader: WeightReader,
    name: str,
    out_features: int,
    in_features: int,
    columns: Span,
    collective: Collective,
    *,
    bias: bool,
) -> RowLinear:
    weight = reader.read(f"{name}.weight", (out_features, in_features), columns=columns)
    full_bias = reader.read(f"{name}.bias", (out_features,)) if bias else None
    return RowLinear(weight, full_bias, collective, reader.tiles)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


_packed_linear = torch.ops.mkldnn._linear_pointwise.default
