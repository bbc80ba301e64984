"""Every kernel set on every device that is here: `kernels` and the `device` of its tensors."""

import pytest
import torch

from paceline.kernels.api import KernelSet
from paceline.kernels.registry import available_kernel_sets, load_kernels
from tests.device import HAS_CUDA

CASES = [pytest.param((name, "cpu"), id=f"{name}-cpu") for name in available_kernel_sets("cpu")]
if HAS_CUDA:
    CASES += [
        pytest.param((name, "cuda"), id=f"{name}-cuda", marks=pytest.mark.gpu)
        for name in available_kernel_sets("cuda")
    ]


@pytest.fixture(params=CASES)
def kernel_case(request: pytest.FixtureRequest) -> tuple[str, str]:
    case: tuple[str, str] = request.param
    return case


@pytest.fixture
def kernels(kernel_case: tuple[str, str]) -> KernelSet:
    return load_kernels(*kernel_case)


@pytest.fixture
def device(kernel_case: tuple[str, str]) -> str:
    return kernel_case[1]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
