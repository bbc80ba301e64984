"""Fixtures every tier shares."""

from pathlib import Path

import pytest

from tests.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with SmolLM2's uneven 9/3 heads."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary."""
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny") / "draft",
        num_heads=4, num_kv_heads=2, hidden_size=32, intermediate_size=48, num_layers=1, seed=1,
    )
