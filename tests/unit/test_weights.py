"""Tensors out of safetensors files: slices, dtypes, and faults that are named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.worker.errors import ConfigError
from paceline.worker.models.checkpoint_files import read_checkpoint_dtype
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.shards import Span
from tests.tiny import make_tiny_model

NAME = "model.layers.0.mlp.down_proj.weight"
SHAPE = (72, 96)


@pytest.fixture(params=[1, 3], ids=["one file", "three files"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_tiny_model(tmp_path / "model", num_layers=1, num_shards=request.param)


def test_a_slice_is_that_part_of_the_tensor(model: Path) -> None:
    whole = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    with WeightReader(model, torch.float32) as reader:
        assert torch.equal(reader.read(NAME, SHAPE), whole[NAME])
        part = reader.read(NAME, SHAPE, rows=Span(3, 9), columns=Span(40, 96))
        assert torch.equal(part, whole[NAME][3:9, 40:])
        norm = reader.read("model.norm.weight", (72,), rows=Span(1, 5))
        assert torch.equal(norm, whole["model.norm.weight"][1:5])


def test_tensors_come_in_the_dtype_asked_for(model: Path) -> None:
    with WeightReader(model, torch.bfloat16) as reader:
        assert reader.read(NAME, SHAPE).dtype == torch.bfloat16


def test_a_missing_tensor_is_named(model: Path) -> None:
    missing = pytest.raises(ConfigError, match=r"lacks the tensor 'lm_head\.weight'")
    with WeightReader(model, torch.float32) as reader, missing:
        reader.read("lm_head.weight", (264, 72))


def test_a_wrong_shape_names_both(model: Path) -> None:
    wrong = pytest.raises(
        ConfigError, match=r"shape \[72, 96\], but config\.json makes it \[72, 8\]"
    )
    with WeightReader(model, torch.float32) as reader, wrong:
        reader.read(NAME, (72, 8))


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(ConfigError, match=r"model\.safetensors' is not a safetensors file"):
        WeightReader(tmp_path, torch.float32)


def test_the_checkpoints_own_dtype_is_read_from_its_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(2, dtype=torch.bfloat16)}, file)
    assert read_checkpoint_dtype(file) == "bfloat16"
