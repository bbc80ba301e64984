"""The installed version."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


def version() -> str:
    try:
        return _installed("paceline")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
