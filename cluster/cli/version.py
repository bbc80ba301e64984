"""`paceline version`."""

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import typer

from paceline.cluster.version import version

_PARTS = ("torch", "ray", "grpcio", "triton", "sglang-kernel")


def show_version(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the versions of what is installed."""
    versions = {"paceline": version(), "python": platform.python_version()}
    for name in _PARTS:
        try:
            versions[name] = installed(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    if as_json:
        print(json.dumps(versions))
        return
    for name, value in versions.items():
        print(f"{name:<14} {value}")
