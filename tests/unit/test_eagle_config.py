"""What is said of a head that does not fit its target, or is none."""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.kernels.registry import load_kernels
from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError, NotFound
from paceline.worker.models.draft_head import build_head
from paceline.worker.models.eagle_config import load_eagle_config
from paceline.worker.models.hot_tokens import hot_tokens_from_offsets, load_token_map
from paceline.worker.models.llama import LlamaModel
from paceline.worker.models.registry import load_model_config
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.local import LocalCollective
from tests.tiny import make_tiny_model
from tests.tiny_heads import HeadSizes, make_eagle3_head, make_eagle_head

TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> ModelConfig:
    return load_model_config(tiny_model, max_model_len=256)


def eagle3(path: Path, **options: Any) -> Path:
    """Any: options of make_eagle3_head; `extra` is for config.json."""
    sizes = HeadSizes(extra=TAPS | options.pop("extra", {}))
    return make_eagle3_head(path, sizes, **options).path


def change_config(path: Path, **values: Any) -> None:  # Any: what JSON holds; None removes
    file = path / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def build(path: Path, target: ModelConfig, token_map: str = "") -> Any:  # Any: a DraftHead
    config = load_eagle_config(path, target)
    kernels = load_kernels("reference", "cpu")
    with WeightReader(target.path, torch.float32) as reader:
        model = LlamaModel(target, reader, LocalCollective(), kernels, 64)
    return build_head(config, model, LocalCollective(), kernels, 64, token_map=token_map)


# --- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "extra", "taps"),
    [
        (32, {}, (2, 16, 29)),
        (30, {}, (2, 15, 27)),
        (30, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [26, 1, 14]}}, (2, 15, 27)),
        (30, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 14, 29]}}, (0, 15, 30)),
        (30, {"eagle_config": {"use_aux_hidden_state": True}}, (2, 15, 27)),
        (30, {"eagle_aux_hidden_state_layer_ids": [2, 15, 30]}, (2, 15, 30)),
    ],
)
def test_taps_are_those_of_the_config_or_the_default_in_layer_order(
    tmp_path: Path,
    target: ModelConfig,
    num_layers: int,
    extra: dict[str, Any],
    taps: tuple[int, ...],
) -> None:
    head = make_eagle3_head(tmp_path, HeadSizes(extra=extra))
    config = load_eagle_config(head.path, replace(target, num_layers=num_layers))
    assert config.taps == taps
    assert config.feature_size == 3 * 72


def test_left_out_layers_do_not_count_for_taps(tmp_path: Path, target: ModelConfig) -> None:
    head = make_eagle3_head(tmp_path)
    shorter = replace(target, num_layers=32, skip_layers=(3, 4))
    assert load_eagle_config(head.path, shorter).taps == (2, 15, 27)


def test_a_head_takes_length_and_dtype_from_its_target(tmp_path: Path, target: ModelConfig) -> None:
    config = load_eagle_config(eagle3(tmp_path), replace(target, dtype="bfloat16"))
    assert (config.model.max_model_len, config.model.dtype) == (256, "bfloat16")
    assert config.kind == "eagle3"
    head = make_eagle_head(tmp_path / "other")
    assert load_eagle_config(head.path, target).kind == "eagle"


def test_settings_that_speculators_nest_are_found(tmp_path: Path, target: ModelConfig) -> None:
    path = eagle3(tmp_path, hot_tokens=range(64))
    config = json.loads((path / "config.json").read_text())
    outer = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    del config["eagle_config"]
    (path / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": config}))
    found = load_eagle_config(path, target)
    assert (found.taps, found.draft_vocab_size, found.norm_before_residual) == ((0, 1, 2), 64, True)


def test_offsets_lead_to_the_targets_ids() -> None:
    offsets = torch.tensor([0, 0, 3, 3, 10], dtype=torch.int32)
    ids = hot_tokens_from_offsets(offsets, 15, "head")
    assert ids.dtype == torch.int64
    assert ids.tolist() == [0, 1, 5, 6, 14]


@pytest.mark.parametrize("kind", ["json", "pt"])
def test_a_token_map_is_a_list_or_a_tensor(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"map.{kind}"
    if kind == "json":
        path.write_text("[9, 2, 5]")
    else:
        torch.save(torch.tensor([9, 2, 5], dtype=torch.int32), path)
    assert load_token_map(path, 10).tolist() == [2, 5, 9]


# --- what is refused --------------------------------------------------------------------------

MISFITS: dict[str, tuple[dict[str, Any], str]] = {  # Any: what JSON holds
    "a tap behind the target": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        r"eagle_config\.eagle_aux_hidden_state_layer_ids \[0, 1, 3\].*has 3 layers.*from -1 to 2",
    ),
    "a tap twice": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}},
        r"\[0, 1, 1\].*each must be once",
    ),
    "taps that are no list": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "0,1,2"}},
        "'0,1,2', must be a list of layers",
    ),
    "two taps for three": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
        r"fc\.weight.*\[72, 216\], must be \[72, 144\].*taps \[1, 2\]",
    ),
    "another target's width": (
        {"target_hidden_size": 4096},
        "reads hidden states of width 4096.*has hidden_size 72",
    ),
    "another vocabulary": ({"vocab_size": 32000}, "32000 tokens.*has 264.*trained for this target"),
    "another width without an embedding": (
        {"hidden_size": 32},
        "hidden_size 32.*cannot share the embedding.*hidden_size 72.*no embed_tokens",
    ),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers 2, must be 1"),
    "a small vocabulary without d2t": ({"draft_vocab_size": 64}, "64 of 264.*lacks d2t"),
    "too large a draft vocabulary": (
        {"draft_vocab_size": 300},
        "300, more than its vocab_size 264",
    ),
    "no draft vocabulary": ({"draft_vocab_size": 0}, "draft_vocab_size is 0, must be a positive"),
    "quantized": ({"quantization_config": {"bits": 4}}, "is quantized"),
    "norms per tap": ({"eagle_config": {"fc_norm": True}}, "has fc_norm, which is not supported"),
    "a normed feature": ({"norm_output": True}, "has norm_output, which is not supported"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_head_that_does_not_fit_its_target_is_refused_with_the_reason(
    tmp_path: Path, target: ModelConfig, case: str
) -> None:
    values, message = MISFITS[case]
    path = eagle3(tmp_path)
    change_config(path, **values)
    with pytest.raises(ConfigError, match=message):
        load_eagle_config(path, target)


def test_default_taps_that_coincide_are_refused(tmp_path: Path, target: ModelConfig) -> None:
    path = make_eagle3_head(tmp_path).path
    with pytest.raises(
        ConfigError, match=r"the default \[2, 2, 1\].*has 4 layers.*set eagle_config"
    ):
        load_eagle_config(path, replace(target, num_layers=4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "lacks fc.weight.*216 features.*hidden_size 72"),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
            "not an EAGLE head for Llama: it holds layers.0.self_attn.q_norm.weight",
        ),
        (lambda t: t.update({"model.fc.weight": torch.ones(1)}), "'fc.weight' twice"),
        (
            lambda t: [
                t.pop(name) for name in [*t] if name in ("fc.weight", "midlayer.hidden_norm.weight")
            ],
            "neither fc.weight.*nor midlayer.hidden_norm.weight.*method standalone",
        ),
    ],
)
def test_a_checkpoint_that_is_no_such_head_is_refused(
    tmp_path: Path,
    target: ModelConfig,
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    path = eagle3(tmp_path)
    change_tensors(path, change)
    with pytest.raises(ConfigError, match=message):
        load_eagle_config(path, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "64 of 264 tokens.*lacks lm_head.weight"),
        (
            lambda t: t.update(d2t=torch.zeros(63).int()),
            r"d2t.*shape \[63\].*draft_vocab_size is 64",
        ),
        (lambda t: t["d2t"].__setitem__(63, 201), "leads to token 264.*tokens 0 to 263"),
        (lambda t: t["d2t"].__setitem__(0, 63), "leads to a token twice"),
        (lambda t: t.update({"norm.weight": torch.ones(71)}), r"norm.weight.*\[71\].*\[72\]"),
        (
            lambda t: t.pop("midlayer.self_attn.o_proj.weight"),
            "lacks the tensor 'layers.0.self_att",
        ),
    ],
)
def test_a_head_with_a_vocabulary_of_its_own_must_be_whole(
    tmp_path: Path,
    target: ModelConfig,
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    path = eagle3(tmp_path, hot_tokens=range(64))
    change_tensors(path, change)
    with pytest.raises(ConfigError, match=message):
        build(path, target)


def test_fused_projections_of_other_sizes_are_refused(tmp_path: Path, target: ModelConfig) -> None:
    path = eagle3(tmp_path, layout="fused")
    change_config(path, num_key_value_heads=1)
    with pytest.raises(ConfigError, match=r"qkv_proj.weight.*120 rows.*72 \+ 8 \+ 8"):
        build(path, target)


def test_an_eagle_head_of_another_width_is_refused(tmp_path: Path, target: ModelConfig) -> None:
    head = make_eagle_head(tmp_path, HeadSizes(hidden_size=32))
    with pytest.raises(ConfigError, match=r"hidden_size 32.*has 72.*shares its target's embedding"):
        load_eagle_config(head.path, target)
    wide = make_eagle_head(tmp_path / "wide", HeadSizes(), layout="midlayer")
    change_tensors(wide.path, lambda t: t.update({"fc.weight": torch.ones(72, 216)}))
    with pytest.raises(ConfigError, match=r"\[72, 216\], must be \[72, 144\].*hidden_size twice"):
        load_eagle_config(wide.path, target)


def test_a_head_with_another_tokenizer_is_refused(
    tmp_path: Path, target: ModelConfig, tiny_model: Path
) -> None:
    path = eagle3(tmp_path)
    tokenizer = (tiny_model / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(tokenizer)
    assert load_eagle_config(path, target).taps == (1, 2, 3)
    (path / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<|done|>"))
    with pytest.raises(ConfigError, match=r"tokenizer in .* is not that of its target"):
        load_eagle_config(path, target)


def test_a_directory_without_a_head_is_refused(tmp_path: Path, target: ModelConfig) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        load_eagle_config(tmp_path / "nowhere", target)
    path = make_tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"neither fc.weight"):
        load_eagle_config(path, target)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model.safetensors"):
        load_eagle_config(path, target)


def test_a_pickled_checkpoint_runs_no_code(tmp_path: Path, target: ModelConfig) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    head = make_eagle_head(tmp_path / "head")
    (head.path / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(), protocol=2))
    with pytest.raises(ConfigError, match="cannot be read as tensors"):
        load_eagle_config(head.path, target)
    assert not (tmp_path / "ran").exists()
    (head.path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot be read as tensors: Ran out of input|it is cut"):
        load_eagle_config(head.path, target)
    torch.save([1, 2], head.path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="something else than named tensors"):
        load_eagle_config(head.path, target)


def test_a_head_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a draft head .*give the model it was trained for"):
        load_model_config(eagle3(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("[1, 2", "neither a JSON list"),
        ('{"a": 1}', "neither a JSON list"),
        ("[]", "at least one"),
        ("[[1], [2]]", "must hold a list of token ids"),
        ("[1.5]", "must hold a list of token ids"),
        ("[1, 264]", "leads to token 264, but the target has tokens 0 to 263"),
        ("[-1]", "leads to token -1"),
        ("[7, 7]", "a token twice"),
    ],
)
def test_a_token_map_that_is_none_is_refused(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "map.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_token_map(path, 264)
