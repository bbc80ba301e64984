"""Cells of a test matrix: all of them, or a few that still bring any two values together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Cell = dict[str, Any]  # any value of any factor
WriteLine = Callable[[str], None]  # one for each cell
Pair = frozenset[tuple[str, Any]]


def full_matrix(factors: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Every combination; the last factor changes fastest."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise_cover(factors: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Cells in which any two values of any two factors meet at least once.

    Greedy and deterministic: each cell is the first of those with the most pairs still missing.
    """
    cells = full_matrix(factors)
    missing = pairs_of(cells)
    cover = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs_of([cell]) & missing))
        missing -= pairs_of([best])
        cover.append(best)
    return cover


def pairs_of(cells: Iterable[Cell]) -> set[Pair]:
    """Each two values, with the names of their factors, that some cell brings together."""
    return {frozenset(pair) for cell in cells for pair in combinations(cell.items(), 2)}


def cell_id(cell: Cell) -> str:
    """`tp2-page16-chunk8`: factor names followed by their values; a value that is text stands
    alone."""
    return "-".join(
        value if isinstance(value, str) else f"{name}{value}" for name, value in cell.items()
    )


def by_engine(cells: Iterable[Cell], engine: Iterable[str]) -> list[Any]:
    """Parameter sets of two values, a cell's part that `engine` names and the cell. Cells of one
    engine follow one another, so that a fixture builds it once."""
    params = []
    for cell in cells:
        part = {name: cell[name] for name in engine}
        params.append(pytest.param(part, cell, id=cell_id(cell)))
    return sorted(params, key=lambda param: cell_id(param.values[0]))
