"""What every benchmark shares: interleaved blocks, ratios with their spread, a table, a JSON file.

A timing means nothing alone: each figure is a ratio of two things measured in the same run, block
by block, so that a busy machine slows both. The ratio reported is the median over blocks, with the
smallest and largest beside it.
"""

import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

MIN_BLOCKS = 5


@dataclass(frozen=True, slots=True)
class Goal:
    """Where a figure should lie; `floor` is the worst accepted value."""

    floor: float
    aim: float | None = None
    higher_is_better: bool = True

    def is_met_by(self, value: float) -> bool:
        return value >= self.floor if self.higher_is_better else value <= self.floor


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and its spread over blocks."""

    name: str
    value: float
    smallest: float
    largest: float
    num_blocks: int
    goal: Goal | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.goal is None or self.goal.is_met_by(self.value)


def figure_of_blocks(
    name: str, blocks: Sequence[float], goal: Goal | None = None, note: str = ""
) -> Figure:
    """The median of `blocks`. Raises ValueError: no block."""
    if not blocks:
        raise ValueError(f"figure {name} has no blocks")
    return Figure(
        name, statistics.median(blocks), min(blocks), max(blocks), len(blocks), goal, note
    )


def measure_ratio(
    name: str,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    *,
    num_blocks: int = MIN_BLOCKS,
    goal: Goal | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Figure:
    """Runs `ours` and `theirs` in turn and compares what they return (a rate or a duration).

    The order alternates from block to block, so that neither always follows the other.
    """
    ours_values: list[float] = []
    theirs_values: list[float] = []
    for block in range(num_blocks):
        pair = [(ours, ours_values), (theirs, theirs_values)]
        for run, values in pair if block % 2 == 0 else reversed(pair):
            values.append(run())
        progress(
            f"{name} block {block + 1}/{num_blocks}: "
            f"{ours_values[-1]:.4g} / {theirs_values[-1]:.4g}"
        )
    ratios = [a / b for a, b in zip(ours_values, theirs_values, strict=True)]
    note = f"{statistics.median(ours_values):.4g} / {statistics.median(theirs_values):.4g}"
    return figure_of_blocks(name, ratios, goal, note)


def machine_facts() -> dict[str, str | int]:
    """What the figures were measured on; numbers and versions only."""
    import torch

    return {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def print_table(console: Console, title: str, figures: Sequence[Figure]) -> None:
    table = Table(title=title)
    for column in ("figure", "median", "min", "max", "blocks", "floor", "", "measured"):
        table.add_column(column, justify="left" if column in ("figure", "measured") else "right")
    for f in figures:
        floor = "" if f.goal is None else f"{f.goal.floor:g}"
        verdict = "" if f.goal is None else ("ok" if f.is_met else "SHORT")
        table.add_row(
            f.name, f"{f.value:.3f}", f"{f.smallest:.3f}", f"{f.largest:.3f}", str(f.num_blocks),
            floor, verdict, f.note,
        )  # fmt: skip
    console.print(table)


def write_results(path: Path, figures: Sequence[Figure], extra: dict[str, object]) -> None:
    """`{"ratios": {name: value}, "machine": {...}, "figures": [...], ...}` for scripts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "ratios": {f.name: round(f.value, 4) for f in figures},
        "machine": machine_facts(),
        "figures": [asdict(f) | {"is_met": f.is_met} for f in figures],
    } | extra
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
