"""A directory of finished directories: an entry appears whole or not at all.

It is made by one process at a time and carries a marker by which damage is seen.

Knows nothing of models: what is in an entry is its builder's business.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from paceline.worker.errors import ConfigError

_MARKER = ".paceline.json"


class FileFacts(msgspec.Struct, frozen=True):
    """What a finished file looked like. Equal size and time spare the hashing."""

    size_bytes: int
    mtime_ns: int
    sha256: str


class Marker(msgspec.Struct, frozen=True):
    """Written last into an entry: it is finished, by this recipe, with these files."""

    recipe: int
    files: dict[str, FileFacts]


def default_cache_dir() -> Path:
    """`$PACELINE_CACHE/models`, else `~/.cache/paceline/models`.

    The one place outside the process entries that reads the environment: every process of a
    deployment must find the same models without being handed a path.
    """
    if root := os.environ.get("PACELINE_CACHE"):
        return Path(root).expanduser() / "models"
    return Path.home() / ".cache" / "paceline" / "models"


def ensure_entry(
    path: Path,
    recipe: int,
    build: Callable[[Path], None],
    progress: Callable[[str, float], None],
) -> Path:
    """The finished entry `path`; `build` fills an empty directory that then takes its place.

    Raises: ConfigError: the cache cannot be written. Whatever `build` raises.
    """
    if is_intact(path, recipe):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path, progress):
            if not is_intact(path, recipe):
                _build_entry(path, recipe, build)
    except OSError as error:
        raise ConfigError(
            f"cannot write the cache entry '{path}': {error.strerror or error}; make room there or "
            "set PACELINE_CACHE to a folder that can be written"
        ) from error
    return path


def is_intact(path: Path, recipe: int) -> bool:
    """Whether an entry is finished and its files are those it was finished with."""
    try:
        marker = msgspec.json.decode((path / _MARKER).read_bytes(), type=Marker)
        if marker.recipe != recipe:
            return False
        facts = {name: _facts(path / name, known) for name, known in marker.files.items()}
    except (OSError, msgspec.MsgspecError):
        return False
    if any(facts[name].sha256 != known.sha256 for name, known in marker.files.items()):
        return False
    if facts != marker.files:  # copied or touched: remember the new times, hash no more
        with contextlib.suppress(OSError):
            _write_marker(path, Marker(recipe, facts))
    return True


def _facts(file: Path, known: FileFacts | None = None) -> FileFacts:
    stat = file.stat()
    size_bytes, mtime_ns = stat.st_size, stat.st_mtime_ns
    if known is not None and size_bytes != known.size_bytes:
        return FileFacts(size_bytes, mtime_ns, "")
    if known is not None and mtime_ns == known.mtime_ns:
        return known
    with file.open("rb") as stream:
        return FileFacts(size_bytes, mtime_ns, hashlib.file_digest(stream, "sha256").hexdigest())


def _write_marker(path: Path, marker: Marker) -> None:
    data = msgspec.json.format(msgspec.json.encode(marker), indent=2)
    descriptor, scratch = tempfile.mkstemp(prefix=_MARKER, dir=path)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
    Path(scratch).chmod(0o644)
    Path(scratch).replace(path / _MARKER)


@contextlib.contextmanager
def _lock(path: Path, progress: Callable[[str, float], None]) -> Iterator[None]:
    """Holds the entry alone. The kernel lets go when a process dies: no lock is left behind."""
    with (path.parent / f".{path.name}.lock").open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that makes {path.name}", 0.0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build_entry(path: Path, recipe: int, build: Callable[[Path], None]) -> None:
    prefix = f".{path.name}.build-"
    for leftover in path.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        entry = work / "entry"
        entry.mkdir()
        build(entry)
        files = {file.name: _facts(file) for file in sorted(entry.iterdir())}
        _write_marker(entry, Marker(recipe, files))
        if path.exists():  # damaged or old; who has its files open keeps them
            path.rename(work / "replaced")
        entry.rename(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
