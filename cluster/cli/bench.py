"""`paceline bench`: measurements on the user's own machine."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Measure speed on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _bench() -> None:
    """Keeps `cpu` a sub-command while it is the only one."""


@app.command()
def cpu(
    model: Annotated[str, typer.Argument(help="Built-in name or directory.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    blocks: Annotated[int, typer.Option(help="Interleaved blocks per ratio, at least 5.")] = 5,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "results/bench-cpu.json"
    ),
    demo: Annotated[bool, typer.Option(help="Also run the demo and measure its memory.")] = True,
    check: Annotated[
        bool, typer.Option(help="Exit with 1 when a figure misses its floor.")
    ] = False,
) -> None:
    """Compare the step loop, and the served path, with transformers' generate."""
    from rich.console import Console

    from paceline.cluster.bench.cpu import run_cpu_benchmark
    from paceline.cluster.models.catalog import resolve_model

    figures = run_cpu_benchmark(
        resolve_model(model),
        dtype=dtype,
        results_path=output,
        num_blocks=blocks,
        with_demo=demo,
        console=Console(width=120),
    )
    if check and not all(figure.is_met for figure in figures):
        raise typer.Exit(1)
