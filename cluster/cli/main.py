"""The `paceline` command: its sub-commands by name, and one line on stderr for any error.

A command's module is imported when the command is called, so that `paceline --help` costs
nothing.

Exit codes: 0 done, 1 failed while running, 2 wrong usage, 3 refused before the start, 130 Ctrl-C.
"""

import importlib
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Command:
    module: str
    name: str  # of a function, or of a typer app
    summary: str


_COMMANDS = {
    "serve": _Command("serve", "serve", "Serve a model until Ctrl-C, then drain."),
    "demo": _Command("demo", "demo", "Start everything on this machine and ask two questions."),
    "generate": _Command("generate", "generate", "Ask a running server; the answer streams."),
    "status": _Command("status", "status", "Show a running server's groups and load."),
    "models": _Command("models", "app", "List the built-in models and fetch them."),
    "verify-lossless": _Command(
        "verify_lossless", "verify_lossless", "Show that a draft changes no answer, here and now."
    ),
    "bench": _Command("bench", "app", "Measure speed against a baseline."),
    "version": _Command("version", "show_version", "Show the versions of what is installed."),
}


class _LazyGroup(typer.core.TyperGroup):
    """Knows its commands' names and summaries; imports one to run it."""

    def list_commands(self, ctx: Any) -> list[str]:  # Any: typer names its context privately
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # Any: as above
        command = _COMMANDS.get(cmd_name)
        if command is None:
            return None
        found = getattr(
            importlib.import_module(f"paceline.cluster.cli.{command.module}"), command.name
        )
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        # Plain help: tables cut the names of options in a narrow terminal and in a pipe.
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(found)
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # Any: as above
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in _COMMANDS.items()])


app = typer.Typer(
    cls=_LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(*, value: bool) -> None:
    if value:
        from paceline.cluster.version import version

        print(version())
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=lambda value: _print_version(value=value), is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Serve large language models from a Ray cluster, with speculative decoding."""


def run(args: "Sequence[str]") -> int:
    """Runs one command line; the exit code. Errors end here, in one line."""
    root = typer.main.get_command(app)
    try:
        code = root.main(list(args) or ["--help"], prog_name="paceline", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in args:
            traceback.print_exc()
        message, code = _explain(error)
        if message:
            print(f"paceline: {message}", file=sys.stderr)
    return code if isinstance(code, int) else 0


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def _explain(error: BaseException) -> tuple[str, int]:
    from paceline.worker.errors import ConfigError, InvalidRequest, NotFound, PacelineError

    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "", EXIT_INTERRUPTED
    if isinstance(error, ConfigError | NotFound):
        return error.message, EXIT_REFUSED
    if isinstance(error, InvalidRequest):
        return error.message, EXIT_USAGE
    if isinstance(error, PacelineError):
        return error.message, EXIT_FAILED
    # typer's own: what was wrong with the command line. Its classes have no public name.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return f"{error.format_message()} (see paceline --help)", error.exit_code
    return f"{type(error).__name__}: {error} (--debug shows where)", EXIT_FAILED


if __name__ == "__main__":
    main()
