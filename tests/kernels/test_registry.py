"""Which kernel set serves which device."""

import builtins
import os
import subprocess
import sys

import pytest

from paceline.kernels.registry import available_kernel_sets, load_kernels
from paceline.kernels.sgl.capabilities import probe_ops
from tests.device import HAS_CUDA


def test_the_reference_serves_a_cpu_by_default() -> None:
    assert load_kernels("auto", "cpu").name == "reference"
    assert available_kernel_sets("cpu")[0] == "reference"


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
