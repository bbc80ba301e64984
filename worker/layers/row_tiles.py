"""RowTile: how many rows a product may have at once so that each row's bits are its own.

A matrix library picks its loops by the shape of a product, and other loops sum in another order. On
a Xeon with AMX, bf16, 1 to 32 rows of oneDNN's packed linear give equal bits wherever a row stands,
33 and more give others; on AVX-512 alone other counts are equal. So nothing is assumed: each shape
is tried out when a model is loaded, and products are padded or cut to counts that proved equal.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
MakeProduct = Callable[[Tensor, Tensor | None], Product]  # of weight [out, in] and bias [out]

TILE = 32
_LARGE_TILES = (64, 128, 256, 512)  # for prompts, where they prove equal to tiles of TILE
_ROWS_AT_ONCE = 4096  # of a trial's factors that are fp32 before they are rounded
_MAX_LARGE_RESULTS = 8_000_000  # of the trial of a large tile; a model's head never gets one


@dataclass(frozen=True, slots=True)
class RowTile:
    """Products of `fewest` to TILE rows, and of `most`, give a row the same bits.

    With `most` 1 no two counts did, and each row is a product of its own.
    """

    fewest: int
    most: int

    def run(self, product: Product, x: Tensor) -> Tensor:
        """product(x), x [T, in] -> [T, out], in calls of such counts."""
        num_rows = x.shape[0]
        if self.fewest <= num_rows <= min(self.most, TILE):
            return product(x)
        parts = [self._run_part(product, part) for part in self._cut(x)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _cut(self, x: Tensor) -> Iterator[Tensor]:
        start, num_rows = 0, x.shape[0]
        for tile in (self.most, min(self.most, TILE)):
            while num_rows - start >= tile:
                yield x[start : start + tile]
                start += tile
        if start < num_rows or num_rows == 0:
            yield x[start:]

    def _run_part(self, product: Product, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if num_rows >= self.fewest or num_rows == 0:
            return product(x)
        padded = x.new_zeros(self.fewest, x.shape[1])
        padded[:num_rows] = x
        return product(padded)[:num_rows]


class RowTiles:
    """Finds the tile of each product of a model, once per shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], RowTile] = {}

    def find(
        self, make: MakeProduct, weight_shape: torch.Size, dtype: torch.dtype, *, has_bias: bool
    ) -> RowTile:
        """make: how products of such a weight are made; they must not depend on its values."""
        key = (weight_shape, dtype, has_bias)
        if key not in self._known:
            out_features, in_features = weight_shape
            trial = _Trial(in_features, dtype)
            bias = torch.zeros(out_features, dtype=dtype) if has_bias else None
            self._known[key] = _try_out(make(trial.weight(out_features), bias), trial, out_features)
        return self._known[key]


class _Trial:
    """Factors whose products are what rounding left of sums that are 0.

    Each input occurs twice, under weights of opposite sign and far apart. So nearly every bit of a
    result tells in which order it was summed: with random factors, of 36,000 bf16 results of one
    576 x 576 product none had told 64 rows from 32, though prompts then went another way.
    """

    def __init__(self, in_features: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._order = torch.randperm(in_features, generator=self._generator)
        self._dtype = dtype

    def weight(self, count: int) -> Tensor:
        return self._random(count, -1.0)

    def rows(self, count: int) -> Tensor:
        return self._random(count, 1.0)

    def _random(self, count: int, sign: float) -> Tensor:
        """[count, in]: halves that are alike up to `sign`, in the trial's order."""
        in_features = len(self._order)
        found = torch.empty(count, in_features, dtype=self._dtype)
        for part in found.split(_ROWS_AT_ONCE):
            half = torch.randn(len(part), in_features // 2, generator=self._generator)
            odd = half.new_zeros(len(part), in_features % 2)
            part.copy_(torch.cat([half, sign * half, odd], 1)[:, self._order])
        return found


def _try_out(product: Product, trial: _Trial, out_features: int) -> RowTile:
    fewest = _fewest(product, trial.rows(TILE))
    if fewest > TILE:
        return RowTile(1, 1)
    tile = RowTile(fewest, TILE)
    for most in _LARGE_TILES:
        if most * out_features > _MAX_LARGE_RESULTS:
            break
        x = trial.rows(most)
        if torch.equal(product(x), RowTile(fewest, TILE).run(product, x)):
            tile = RowTile(fewest, most)
    return tile


def _fewest(product: Product, x: Tensor) -> int:
    """The least count from which on all counts up to x's agree, whatever the place and order of
    rows; more than x has where not even these do not matter."""
    want = product(x)
    fewest = len(x) + 1
    for count in range(len(x), 0, -1):
        behind = len(x) - count
        if not torch.equal(product(x[:count]), want[:count]):
            break
        if not torch.equal(product(x[behind:].flip(0)), want[behind:].flip(0)):
            break
        fewest = count
    return fewest
