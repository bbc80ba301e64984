"""Fixtures every tier shares."""

from pathlib import Path

import pytest
import torch

import tests.device  # noqa: F401  # before anything that imports triton
from paceline.cluster.models import get_model
from tests.skips import NEEDS_GPU, SkipReport
from tests.tiny import make_tiny_model

_TIERS = ("dist", "chaos", "kernels", "models")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipReport(), "skip-report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test has the marker of its folder; one that needs a GPU skips where there is none."""
    root = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(root).parts[0]
        if tier in _TIERS:
            item.add_marker(tier)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU.reason))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with SmolLM2's uneven 9/3 heads."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary."""
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny") / "draft",
        num_heads=4,
        num_kv_heads=2,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        seed=1,
    )


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The built-in target, from the user's model cache: `make test` has put it there."""
    return get_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_draft() -> Path:
    """The draft that is shipped for it."""
    return get_model("smollm2-135m-draft")
