"""The compiled form of kernels.cpp: found in the cache, or built there once per machine."""

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("g++", "c++")  # of GCC: the source uses its vector extensions
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden",
    # Rounding must be as written: a product and a sum are fused only where the source says so.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi",
)  # fmt: skip
_BUILD_LIMIT_S = 120.0


class NativeBuildError(ValueError):
    """There is no compiler, or it could not build the kernels."""


def can_build() -> bool:
    """Whether `load_library` is worth a try: a 64-bit Linux with a C++ compiler."""
    return platform.system() == "Linux" and _compiler() is not None


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The kernels, built first where they are not in the cache yet (a second or two).

    torch must have been imported: both use the threads of its OpenMP library.

    Raises: NativeBuildError: no compiler, or what it said.
    """
    compiler = _compiler()
    if compiler is None:
        raise NativeBuildError(f"no C++ compiler on the PATH, looked for {', '.join(_COMPILERS)}")
    try:
        name = f"kernels-{_fingerprint(compiler)}.so"
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{compiler[0]} does not run: {error}") from error
    for make_folder in (_cache_dir, _temporary_dir):
        try:
            path = make_folder() / name
            if not path.exists():
                _compile(compiler, path)
            return ctypes.CDLL(str(path))
        except (OSError, RuntimeError) as error:  # a folder that cannot be written or run from
            log.info("native kernels cannot live there: %s", error)
    raise NativeBuildError("no folder to keep the built kernels in; set PACELINE_CACHE to one")


def _compile(compiler: list[str], path: Path) -> None:
    # Ranks may build at once, on nodes that share the folder too: each writes a file of its own,
    # and the last rename wins.
    part = path.with_suffix(f".{secrets.token_hex(8)}.part")
    try:
        done = subprocess.run(
            [*compiler, *_FLAGS, str(_SOURCE), "-o", str(part)],
            capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not part.exists():
            raise NativeBuildError(f"{compiler[0]} failed: {done.stderr.strip()[-2000:]}")
        part.replace(path)
        log.info("built native kernels path=%s", path)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{compiler[0]} took longer than {_BUILD_LIMIT_S:g} s") from error
    finally:
        part.unlink(missing_ok=True)


def _compiler() -> list[str] | None:
    """The program, and what CXX gives it, as in "ccache g++"."""
    chosen = os.environ.get("CXX", "").split()
    names = chosen[:1] or _COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    return None if found is None else [found, *chosen[1:]]


def _cache_dir() -> Path:
    """Raises: OSError, RuntimeError: it cannot be made, or nobody knows the user's home."""
    chosen = os.environ.get("PACELINE_CACHE")
    folder = (Path(chosen) if chosen else Path.home() / ".cache" / "paceline") / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _temporary_dir() -> Path:
    """Raises: OSError: it cannot be made, or what lies in it may be another user's."""
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others may write to '{folder}'")
    return folder


def _fingerprint(compiler: list[str]) -> str:
    """Of all that decides what is built: the source, the flags, the compiler, the processor."""
    digest = hashlib.sha256(_SOURCE.read_bytes())
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, timeout=_BUILD_LIMIT_S, check=False
    )
    flags = " ".join([*compiler[1:], *_FLAGS])
    digest.update(flags.encode() + version.stdout + _cpu_features())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    """What -march=native looks at."""
    wanted = (b"model name", b"flags", b"Features")
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith(wanted)}))
