"""RowTile: counts of rows are tried out, and only those that proved equal are used."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.worker.layers.linear import Linear
from paceline.worker.layers.row_tiles import TILE, Product, RowTile, RowTiles

BF16 = torch.bfloat16
OUT, IN = 40, 64


def in_two_orders(is_other: Callable[[int, int], bool]) -> Callable[..., Product]:
    """Products that sum the rows for which `is_other(row, count)` from the last input on."""

    def make(weight: Tensor, bias: Tensor | None) -> Product:
        def product(x: Tensor) -> Tensor:
            terms = x.float().unsqueeze(1) * weight.float()  # [T, OUT, IN]
            sums, other = torch.zeros(2, len(x), len(weight))
            for i in range(IN):
                sums += terms[:, :, i]
                other += terms[:, :, IN - 1 - i]
            is_flipped = torch.tensor(
                [is_other(i, len(x)) for i in range(len(x))], dtype=torch.bool
            )
            return torch.where(is_flipped.unsqueeze(1), other, sums).to(weight.dtype)

        return product

    return make


def find(make: Callable[..., Product]) -> RowTile:
    return RowTiles().find(make, torch.Size((OUT, IN)), BF16, has_bias=False)


@pytest.mark.parametrize(
    ("is_other", "tile"),
    [
        (lambda row, count: False, RowTile(1, 512)),
        (lambda row, count: count > TILE, RowTile(1, TILE)),
        (lambda row, count: count > 2 * TILE, RowTile(1, 2 * TILE)),
        (lambda row, count: count == 1, RowTile(2, 512)),
        (lambda row, count: count < 5, RowTile(5, 512)),
        (lambda row, count: count < TILE, RowTile(TILE, 512)),
        (lambda row, count: row == 3 and count > 8, RowTile(1, 1)),  # the place matters
        (lambda row, count: row % 2 == 1, RowTile(1, 1)),
    ],
    ids=["all", "one tile", "two", "not alone", "five", "whole tiles", "row 3", "odd rows"],
)
def test_only_counts_and_places_that_agree_are_used(
    is_other: Callable[[int, int], bool], tile: RowTile
) -> None:
    make = in_two_orders(is_other)
    assert find(make) == tile
    weight, x = torch.randn(OUT, IN).to(BF16), torch.randn(2 * TILE + 7, IN).to(BF16)
    product = make(weight, None)
    alone = torch.cat([tile.run(product, x[i : i + 1]) for i in range(len(x))])
    for count in (0, 1, 2, 5, TILE - 1, TILE, TILE + 1, len(x)):
        assert torch.equal(tile.run(product, x[:count]), alone[:count])


def test_a_shape_is_tried_out_once() -> None:
    made: list[torch.Size] = []

    def make(weight: Tensor, bias: Tensor | None) -> Product:
        made.append(weight.shape)
        return lambda x: x @ weight.T

    tiles = RowTiles()
    for _ in range(3):
        tiles.find(make, torch.Size((OUT, IN)), BF16, has_bias=False)
    tiles.find(make, torch.Size((OUT, IN + 1)), BF16, has_bias=False)
    assert made == [(OUT, IN), (OUT, IN + 1)]


@pytest.fixture(scope="module")
def tiles() -> RowTiles:
    return RowTiles()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_company(
    tiles: RowTiles, dtype: torch.dtype, has_bias: bool, data: st.DataObject
) -> None:
    out_features, in_features = data.draw(
        st.sampled_from([(96, 72), (200, 72), (72, 96), (960, 576), (576, 576), (576, 1536)])
    )
    gen = torch.Generator().manual_seed(data.draw(st.integers(0, 3)))
    weight = (torch.randn(out_features, in_features, generator=gen) * 0.1).to(dtype)
    bias = torch.randn(out_features, generator=gen).to(dtype) if has_bias else None
    linear, plain = Linear(weight, bias, tiles), Linear(weight, bias)
    num_rows = data.draw(st.integers(1, 150))
    x = torch.randn(num_rows, in_features, generator=gen).to(dtype)
    whole = linear(x)
    start = data.draw(st.integers(0, num_rows - 1))
    stop = data.draw(st.integers(start + 1, num_rows))
    assert torch.equal(linear(x[start:stop]), whole[start:stop])
    assert torch.equal(linear(x[start : start + 1]), whole[start : start + 1])
    torch.testing.assert_close(whole, plain(x), atol=0.05, rtol=0.05)
