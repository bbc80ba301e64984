"""ClusterConfig: TOML, overrides, and refusals that name the key."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import load_config, parse_config, parse_speculative_config
from paceline.worker.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_shipped_examples_parse(path: Path) -> None:
    config = load_config(path)
    assert config.draft.method == "standalone"
    assert config.draft.spec_config().num_draft_tokens == config.draft.num_steps + 1


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('model = "m"\n[target]\ntensor_parallel_size = 2\n[front]\nport = 1\n')
    config = load_config(path, {"target.tensor_parallel_size": 4, "front.port": None})
    assert (config.target.tensor_parallel_size, config.front.port) == (4, 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model": "m", "drft": {}}, "unknown key 'drft'; did you mean 'draft'?"),
        (
            {"model": "m", "draft": {"num_step": 2}},
            "unknown key 'num_step' in [draft]; did you mean 'num_steps'?",
        ),
        ({"model": "m", "cache": {"zzz": 2}}, "known keys: page_size, num_pages"),
        ({}, "'model' is missing; give a built-in name"),
        ({"model": "m", "target": 5}, "'target' is 5: it must be a table, [target]"),
        (
            {"model": "m", "target": {"tensor_parallel_size": 0}},
            "'target.tensor_parallel_size' is 0",
        ),
        (
            {"model": "m", "cache": {"page_size": 3}},
            "'cache.page_size' is 3: input should be 1, 16",
        ),
        ({"model": "m", "draft": {"method": "standalone"}}, "[draft] method is 'standalone' but"),
        ({"model": "m", "draft": {"model": "d"}}, "method is 'none'"),
        (
            {"model": "m", "draft": {"method": "ngram", "num_steps": 2, "num_draft_tokens": 9}},
            "num_steps=2 and topk=1 has 3 nodes at most",
        ),
        ({"model": "m", "draft": {"topk": 33}}, "'draft.topk' is 33"),
        (
            {"model": "m", "draft": {"method": "ngram", "num_draft_tokens": 1}},
            "[draft] num_draft_tokens is 1; it must be in 2..1024",
        ),
        (
            {"model": "m", "draft": {"method": "ngram", "timeout_s": float("inf")}},
            "[draft] the draft's timeout is inf s",
        ),
        ({"model": "m", "front": {"api_keys": [""]}}, "an API key is empty"),
        ({"model": "m", "front": {"ssl_keyfile": "k"}}, "ssl_keyfile and ssl_certfile go together"),
        ({"model": "m", "scheduler": {"max_num_batched_tokens": 4}}, "max_num_seqs (32)"),
    ],
)
def test_refusal_names_the_key_and_what_is_allowed(data: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data, "file")
    assert str(caught.value).startswith("file: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("front.port", 99999, "--port ('front.port') is 99999: input should be less than"),
        ("target.groups", 0, "--groups ('target.groups') is 0: "),
        ("draft.timeout_s", -0.003, "--draft-timeout-ms ('draft.timeout_s') is -3: "),
        ("cache.page_size", 3, "--page-size ('cache.page_size') is 3: "),
    ],
)
def test_refusal_of_a_flag_names_it_and_the_value_it_was_given(
    key: str, value: float, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "m"\n[front]\ngrpc_port = -1\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, {key: value})
    assert words in caught.value.message
    assert "; 'front.grpc_port' is -1: " in f"; {caught.value.message.partition(': ')[2]}"


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'a'.*unknown key 'b'"):
        parse_config({"model": "m", "a": 1, "b": 2})


def test_missing_or_broken_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "b.toml"
    broken.write_text("model = \n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(broken)


def test_speculative_config_takes_the_known_json_shape() -> None:
    overrides = parse_speculative_config(
        '{"method": "draft_model", "model": "d", "num_speculative_tokens": 5,'
        ' "draft_tensor_parallel_size": 2}'
    )
    draft = load_config(None, {"model": "m", **overrides}).draft
    assert (draft.method, draft.model, draft.num_steps) == ("standalone", "d", 5)
    assert draft.tensor_parallel_size == 2
    assert parse_speculative_config('{"model": "d"}')["draft.method"] == "standalone"


@pytest.mark.parametrize("text", ["{", "[]", '{"num_spec": 1}', "3"])
def test_speculative_config_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        parse_speculative_config(text)


def test_tree_gets_room_for_all_its_branches() -> None:
    draft: dict[str, Any] = {"draft.method": "standalone", "draft.model": "d", "draft.topk": 2}
    assert load_config(None, {"model": "m", **draft}).draft.spec_config().num_draft_tokens == 9
    draft |= {"draft.topk": 32, "draft.num_steps": 64}
    assert load_config(None, {"model": "m", **draft}).draft.spec_config().num_draft_tokens == 1024


def test_names_default_to_the_models_own() -> None:
    assert parse_config({"model": "/a/b/smol"}).names == ("smol",)
    assert parse_config({"model": "m", "served_model_names": ["x", "y"]}).names == ("x", "y")
