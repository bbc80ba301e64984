"""`paceline bench`: measurements on the user's own machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cluster.cli.spec_options import Adaptive, Draft, NumDraftTokens, NumSteps, Topk

if TYPE_CHECKING:
    from paceline.worker.config import SpecConfig

app = typer.Typer(
    help="Measure speed on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


@app.command()
def spec(
    model: Annotated[str, typer.Argument(help="Built-in name or directory.")] = "smollm2-135m",
    draft: Draft = "smollm2-135m-eagle3",
    num_steps: NumSteps = None,
    topk: Topk = None,
    num_draft_tokens: NumDraftTokens = None,
    adaptive: Adaptive = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    blocks: Annotated[int, typer.Option(help="Interleaved blocks per ratio, at least 5.")] = 5,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "results/bench-spec.json"
    ),
    check: Annotated[
        bool, typer.Option(help="Exit with 1 when a figure misses its floor.")
    ] = False,
) -> None:
    """Compare decoding with a draft on the target's own ranks with plain decoding."""
    from rich.console import Console

    from paceline.cluster.bench.spec import run_spec_benchmark

    resolved, found = _resolve(
        model, draft, dtype, device,
        num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens, adaptive=adaptive,
    )  # fmt: skip
    figures = run_spec_benchmark(
        resolved,
        found,
        device=device,
        dtype=dtype,
        results_path=output,
        num_blocks=blocks,
        console=Console(width=120),
    )
    if check and not all(figure.is_met for figure in figures):
        raise typer.Exit(1)


@app.command()
def flips(
    model: Annotated[str, typer.Argument(help="Built-in name or directory.")] = "smollm2-135m",
    draft: Draft = "smollm2-135m-eagle3",
    num_steps: NumSteps = None,
    topk: Topk = None,
    num_draft_tokens: NumDraftTokens = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    num_prompts: Annotated[int, typer.Option(help="Of the built-in ones, 77 at most.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.")] = 128,
    output: Annotated[Path, typer.Option(help="Where the figures go, as JSON.")] = Path(
        "results/bench-flips.json"
    ),
    check: Annotated[
        bool, typer.Option(help="Exit with 1 when a token flips although deterministic.")
    ] = False,
) -> None:
    """Count the tokens that rounding changes in a batch or beside a draft."""
    from rich.console import Console

    from paceline.cluster.bench.flips import run_flips

    resolved, found = _resolve(
        model, draft, dtype, "cpu",
        num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens,
    )  # fmt: skip
    figures = run_flips(
        resolved,
        found,
        dtype=dtype,
        num_prompts=num_prompts,
        max_tokens=max_tokens,
        results_path=output,
        console=Console(width=120),
    )
    if check and not all(figure.is_met for figure in figures):
        raise typer.Exit(1)


def _resolve(
    model: str, draft: str | None, dtype: str, device: str, **options: int | bool | None
) -> tuple[Path, "SpecConfig"]:
    """The model's directory, and speculation with a draft on its ranks."""
    from dataclasses import replace

    from paceline.cluster.config import parse_config
    from paceline.cluster.models.catalog import resolve_model
    from paceline.cluster.preflight import resolve_models

    section = {"model": draft, "placement": "colocated"} | options
    given = {name: value for name, value in section.items() if value is not None}
    config = parse_config(
        {"model": model, "dtype": dtype, "device": device, "draft": given}, "the benchmark"
    )
    resolved = resolve_models(config, lambda role, stage, done: None)
    spec = resolved.draft.spec_config(device)
    return resolve_model(resolved.model), replace(
        spec, draft_model=str(resolve_model(resolved.draft.model))
    )
