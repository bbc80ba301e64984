"""The compiled form of kernels.cpp: found in the cache, or built there once per machine."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_COMPILERS = ("c++", "g++", "clang++")
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
    name = f"kernels-{_fingerprint(compiler)}.so"
    for folder in (_cache_dir(), Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / name
            if not path.exists():
                _compile(compiler, path)
            return ctypes.CDLL(str(path))
        except OSError as error:  # a folder that cannot be written or run from
            log.info("native kernels cannot live in %s: %s", folder, error)
    raise NativeBuildError("no folder to keep the built kernels in; set PACELINE_CACHE to one")


def _compile(compiler: str, path: Path) -> None:
    # Ranks may build at once: each writes a file of its own, and the last rename wins.
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, str(_SOURCE), "-o", str(part)],
            capture_output=True, text=True, timeout=_BUILD_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise NativeBuildError(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        part.replace(path)
        log.info("built native kernels path=%s", path)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(f"{compiler} took longer than {_BUILD_LIMIT_S:g} s") from error
    finally:
        part.unlink(missing_ok=True)


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (chosen,) if chosen else _COMPILERS)), None)


def _cache_dir() -> Path:
    chosen = os.environ.get("PACELINE_CACHE")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "paceline") / "native"


def _fingerprint(compiler: str) -> str:
    """Of all that decides what is built: the source, the flags, the compiler, the processor."""
    digest = hashlib.sha256(_SOURCE.read_bytes())
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, timeout=_BUILD_LIMIT_S, check=False
    )
    digest.update(" ".join(_FLAGS).encode() + version.stdout + _cpu_features())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    """What -march=native looks at."""
    wanted = (b"model name", b"flags", b"Features")
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return b"\n".join(sorted({line for line in lines if line.startswith(wanted)}))
