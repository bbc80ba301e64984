"""Kernel sets by name. Factories are lazy: naming a set that is not used imports nothing of it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.kernels.api import KernelSet

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    make: Callable[[], KernelSet]
    can_serve: Callable[[str], bool]
    # Its form that gives a row the same bits whatever rows are beside it; on a CPU.
    make_deterministic: Callable[[], KernelSet] | None = None


def load_kernels(name: str, device: str, *, deterministic: bool = False) -> KernelSet:
    """The set `name`, or for "auto" the quickest that serves `device` ("cpu", "cuda", "cuda:1").

    Args:
        deterministic: what it computes for a row must depend on that row alone, to the last bit.
    Raises: ValueError: no such set, or it cannot serve the device here, or not that way.
        NativeBuildError: "native" was named, and cannot be built.
    """
    available = available_kernel_sets(device)
    if name == "auto" and not _is_cuda(device):
        return _make_quickest_for_cpu(deterministic=deterministic)
    if name == "auto":
        name = available[-1]
    if name not in _SETS:
        raise ValueError(f"kernel set {name!r} is unknown; choose auto or one of {list(_SETS)}")
    if name not in available:
        raise ValueError(
            f"kernel set {name!r} cannot serve device {device!r} here; "
            f"choose auto or one of {available}"
        )
    if not deterministic:
        return _SETS[name].make()
    make = _SETS[name].make_deterministic
    if make is None or _is_cuda(device):
        able = [n for n, entry in _SETS.items() if entry.make_deterministic]
        raise ValueError(
            f"kernel set {name!r} on device {device!r} has no deterministic form; use device 'cpu' "
            f"with auto or one of {able}, or serve without deterministic"
        )
    return make()


def available_kernel_sets(device: str = "cpu") -> list[str]:
    """Names of the sets that can serve `device` here; on CUDA the quickest is last."""
    return [name for name, entry in _SETS.items() if entry.can_serve(device)]


def _make_quickest_for_cpu(*, deterministic: bool) -> KernelSet:
    """Not Triton's: on a CPU it is interpreted, a thousand times slower."""
    from paceline.kernels.native.build import NativeBuildError

    if _can_native("cpu"):
        try:
            return _make_deterministic_native() if deterministic else _make_native()
        except NativeBuildError as error:
            log.warning("serving with the slower reference kernels: %s", error)
    return _make_deterministic_reference() if deterministic else _make_reference()


def _is_cuda(device: str) -> bool:
    return device.split(":")[0] == "cuda"


def _can_native(device: str) -> bool:
    from paceline.kernels.native.build import can_build

    return not _is_cuda(device) and can_build()


def _can_triton(device: str) -> bool:
    """Compiled for CUDA; on a CPU only where TRITON_INTERPRET was set before triton's import."""
    if find_spec("triton") is None:
        return False
    from triton.language import standard
    from triton.runtime.jit import JITFunction

    return isinstance(standard.sum, JITFunction) == _is_cuda(device)


def _can_sgl(device: str) -> bool:
    from paceline.kernels.sgl.capabilities import probe_ops

    return _is_cuda(device) and _can_triton(device) and bool(probe_ops())


def _make_reference() -> KernelSet:
    from paceline.kernels.reference.kernel_set import ReferenceKernels

    return ReferenceKernels()


def _make_deterministic_reference() -> KernelSet:
    from paceline.kernels.reference.deterministic import DeterministicReference

    return DeterministicReference()


def _make_native() -> KernelSet:
    from paceline.kernels.native.kernel_set import NativeKernels

    return NativeKernels()


def _make_deterministic_native() -> KernelSet:
    from paceline.kernels.native.deterministic import DeterministicNative

    return DeterministicNative()


def _make_triton() -> KernelSet:
    from paceline.kernels.paged.kernel_set import TritonKernels

    return TritonKernels()


def _make_sgl() -> KernelSet:
    from paceline.kernels.sgl.dispatch import SglKernels

    return SglKernels()


_SETS = {
    "reference": _Entry(_make_reference, lambda device: True, _make_deterministic_reference),
    "native": _Entry(_make_native, _can_native, _make_deterministic_native),
    "triton": _Entry(_make_triton, _can_triton),
    "sgl": _Entry(_make_sgl, _can_sgl),
}
