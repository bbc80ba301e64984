"""Kernel sets by name. Factories are lazy: naming a set that is not used imports nothing of it."""

from collections.abc import Callable
from importlib.util import find_spec

from paceline.kernels.api import KernelSet


def load_kernels(name: str, device: str) -> KernelSet:
    """The set `name`, or for "auto" the quickest that serves `device` ("cpu", "cuda", "cuda:1").

    Raises:
        ValueError: no such set, or it cannot serve the device here.
    """
    available = available_kernel_sets(device)
    chosen = available[-1] if name == "auto" else name
    if chosen not in _FACTORIES:
        raise ValueError(f"kernel set {name!r} is unknown; choose auto or one of {list(_FACTORIES)}")
    if chosen not in available:
        raise ValueError(
            f"kernel set {name!r} cannot serve device {device!r} here; choose auto or one of {available}"
        )
    return _FACTORIES[chosen]()


def available_kernel_sets(device: str = "cpu") -> list[str]:
    """Names of the sets that can serve `device` here, the preferred last."""
    return [name for name in _FACTORIES if _CAN_SERVE[name](device)]


def _make_reference() -> KernelSet:
    from paceline.kernels.reference.kernel_set import ReferenceKernels

    return ReferenceKernels()


_FACTORIES: dict[str, Callable[[], KernelSet]] = {"reference": _make_reference}
_CAN_SERVE: dict[str, Callable[[str], bool]] = {"reference": lambda device: True}
