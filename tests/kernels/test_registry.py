"""Which kernel set serves which device."""

import builtins
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.kernels.native.build import can_build, load_library
from paceline.kernels.registry import available_kernel_sets, load_kernels
from paceline.kernels.sgl.capabilities import probe_ops
from tests.device import HAS_CUDA


def test_compiled_kernels_serve_a_cpu_where_they_can_be_built() -> None:
    assert load_kernels("auto", "cpu").name == ("native" if can_build() else "reference")
    assert available_kernel_sets("cpu")[0] == "reference"


def test_without_a_compiler_the_reference_serves_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_kernels("auto", "cpu").name == "reference"
    with pytest.raises(ValueError, match="'native' cannot serve device 'cpu' here"):
        load_kernels("native", "cpu")


def test_a_failing_compiler_costs_speed_only_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    load_library.cache_clear()
    assert load_kernels("auto", "cpu").name == "reference"
    assert "out of order" in caplog.text
    with pytest.raises(ValueError, match="out of order"):
        load_kernels("native", "cpu")
    assert not list(tmp_path.glob("cache/native/*"))
    load_library.cache_clear()


def test_kernels_are_built_once_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not can_build():
        return  # the set is not offered here, as the first test proves
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    load_library.cache_clear()
    load_kernels("native", "cpu")
    built = list((tmp_path / "native").iterdir())
    assert [path.suffix for path in built] == [".so"]
    built_at = built[0].stat().st_mtime_ns
    load_library.cache_clear()
    load_kernels("native", "cpu")
    assert built[0].stat().st_mtime_ns == built_at
    load_library.cache_clear()


def test_a_compiler_that_does_not_run_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("no program\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    load_library.cache_clear()
    assert load_kernels("auto", "cpu").name == "reference"
    assert f"{broken} does not run" in caplog.text
    load_library.cache_clear()


def test_builders_give_the_compiler_its_options_and_a_file_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in containers that share a cache: their process ids may be alike."""
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "log"}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -DOURS")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        load_library.cache_clear()
        with pytest.raises(ValueError, match="failed"):
            load_kernels("native", "cpu")
    calls = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    outputs = {args[-1] for args in calls if args[-2] == "-o"}
    assert len(outputs) == 2
    assert all(args[0] == "-DOURS" for args in calls)
    load_library.cache_clear()


def test_nothing_is_run_from_a_folder_that_others_may_write_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not can_build():
        return  # the set is not offered here, as the first test proves
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"paceline-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    load_library.cache_clear()
    with pytest.raises(ValueError, match="no folder to keep the built kernels in"):
        load_kernels("native", "cpu")
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    load_kernels("native", "cpu")
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    load_library.cache_clear()


def test_an_unknown_set_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"'cuda9' is unknown; choose auto or one of \['reference'"
    ):
        load_kernels("cuda9", "cpu")


def test_a_set_that_cannot_serve_the_device_is_refused() -> None:
    with pytest.raises(ValueError, match="'sgl' cannot serve device 'cpu' here"):
        load_kernels("sgl", "cpu")


def test_compiled_triton_is_not_offered_for_a_cpu() -> None:
    code = (
        "from paceline.kernels.registry import available_kernel_sets as sets;"
        "print(sets('cpu'), sets('cuda'))"
    )
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=compiled, capture_output=True, text=True, check=False
    )
    assert shown.stderr == ""
    assert "'triton'" not in shown.stdout.split("]")[0]


def test_an_sgl_kernel_that_does_not_load_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def failing_import(name: str, *args: object) -> object:
        if name == "sgl_kernel":
            raise OSError("libnuma.so.1: cannot open shared object file")
        return real_import(name, *args)  # type: ignore[arg-type]  # passed through as it came

    monkeypatch.setattr(builtins, "__import__", failing_import)
    monkeypatch.setattr("paceline.kernels.sgl.capabilities.find_spec", lambda name: object())
    probe_ops.cache_clear()
    assert probe_ops() == frozenset()
    probe_ops.cache_clear()


@pytest.mark.gpu
def test_triton_or_better_serves_cuda_by_default() -> None:
    assert HAS_CUDA
    assert load_kernels("auto", "cuda").name in ("triton", "sgl")
