"""The model configuration that a checkpoint directory gives, key by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.worker.errors import ConfigError, NotFound
from paceline.worker.models.registry import load_model_config
from tests.tiny import make_tiny_model

Json = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden_size=72, num_layers=2, num_shards=2)


def edit(model: Path, **changes: object) -> Path:
    """Changes keys of config.json; None removes one."""
    file = model / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return model


def test_a_checkpoint_says_what_it_is(model: Path) -> None:
    config = load_model_config(model)
    assert (config.architecture, config.path) == ("LlamaForCausalLM", str(model))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 8)
    assert (config.max_model_len, config.dtype, config.rope_scaling) == (512, "float32", ())
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)


def test_absent_keys_take_the_values_that_transformers_gives_them(model: Path) -> None:
    edit(model, head_dim=None, num_key_value_heads=None, dtype=None, rope_theta=None)
    config = load_model_config(model)
    assert (config.head_dim, config.num_kv_heads) == (72 // 9, 9)
    assert config.dtype == "float32"  # of the weights themselves
    assert config.rope_theta == 10000.0


def test_the_ends_of_both_files_count_once_each(model: Path) -> None:
    edit(model, eos_token_id=[2, 7])
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert load_model_config(model).eos_token_ids == (0, 2, 7)


LLAMA3: Json = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {
            "rope_theta": None,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ],
)
def test_all_spellings_of_rope_scaling_are_read(model: Path, changes: Json) -> None:
    config = load_model_config(edit(model, **changes))
    assert config.rope_theta == 5e5
    assert dict(config.rope_scaling) == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_is_asked_for_wins(model: Path, dtype: str) -> None:
    assert load_model_config(model, dtype=dtype).dtype == dtype


def test_a_shorter_context_may_be_asked_for(model: Path) -> None:
    assert load_model_config(model, max_model_len=100).max_model_len == 100


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere' does not exist"):
        load_model_config(tmp_path / "nowhere")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "not a causal language model.*LlamaForCausalLM"),
        ({"architectures": ["GPT2LMHeadModel"]}, "supported are: LlamaForCausalLM"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*supported are: Llama"),
        ({"architectures": None}, "none given.*supported are: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; supported is: silu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'; supported are: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' has factor None"),
        ({"architectures": 7}, "'7' is not supported"),
        ({"architectures": {"first": 1}}, "'first': 1.* is not supported"),
        ({"rope_theta": "big"}, "rope_theta is 'big', must be above 0"),
        ({"rope_theta": -1}, "rope_theta is -1, must be above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', must be an object"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', must be above 0"),
        ({"hidden_size": "72"}, "hidden_size is '72'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"dtype": "float8"}, "dtype 'float8'"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(
    model: Path, changes: Json, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_config(edit(model, **changes))


def test_a_context_beyond_the_models_is_refused_with_the_limit(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 513.*has 512 positions"):
        load_model_config(model, max_model_len=513)


def test_an_unknown_dtype_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int4', must be one of"):
        load_model_config(model, dtype="int4")


@pytest.mark.parametrize("skip_layers", [(2,), (-1,), (0, 1)])
def test_layers_that_cannot_be_left_out_are_refused(
    model: Path, skip_layers: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match="skip_layers"):
        load_model_config(model, skip_layers=skip_layers)


def test_a_missing_shard_is_named(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks the shard 'model-00002-of-00002\.safetensors'"):
        load_model_config(model)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", num_layers=1)
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load_model_config(model)


def test_an_index_that_is_none_is_refused(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="not an index of safetensors"):
        load_model_config(model)
