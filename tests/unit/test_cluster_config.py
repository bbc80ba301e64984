"""ClusterConfig: TOML, overrides, and refusals that name the key."""

from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import load_config, parse_config
from paceline.cluster.controller.deployment import draft_specs, target_specs
from paceline.cluster.draft_config import DraftSection, parse_speculative_config
from paceline.worker.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_shipped_examples_parse(path: Path) -> None:
    draft = load_config(path).draft
    assert draft.model
    if draft.method != "auto":
        spec = draft.spec_config()
        assert spec.num_draft_tokens == spec.num_steps + 1


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
        (
            {"model": "m", "draft": {"method": "ngram", "model": "d"}},
            "[draft] model is 'd' but method is 'ngram'; leave out one of them",
        ),
        ({"model": "m", "draft": {"method": "eagle3"}}, "[draft] method is 'eagle3' but model is"),
        (
            {"model": "m", "deterministic": True, "device": "cuda"},
            "kept on CPUs by the kernel sets native and reference, not by kernels 'auto' on device "
            "'cuda'; set device 'cpu'",
        ),
        ({"model": "m", "deterministic": True, "kernels": "triton"}, "not by kernels 'triton'"),
        (
            {"model": "m", "draft": {"method": "eagle", "model": "h", "placement": "decoupled"}},
            "a head reads its target's hidden states",
        ),
        (
            {"model": "m", "draft": {"method": "eagle3", "model": "h", "groups": 2}},
            "[draft] groups is 2, but a colocated draft runs on the target's own ranks",
        ),
        (
            {"model": "m", "draft": {"method": "eagle3", "model": "h", "fallback": "ngram"}},
            "[draft] fallback is 'ngram', but a colocated draft is there whenever",
        ),
        (
            {
                "model": "m",
                "draft": {
                    "method": "standalone",
                    "model": "d",
                    "placement": "colocated",
                    "tensor_parallel_size": 2,
                },
            },
            "[draft] tensor_parallel_size is 2, but a colocated draft",
        ),
        ({"model": "m", "draft": {"rule": "maybe"}}, "'draft.rule' is 'maybe': input should be"),
        (
            {"model": "m", "draft": {"model": "h", "threshold_single": 0.5}},
            "rule 'coupled' knows no threshold",
        ),
        (
            {"model": "m", "draft": {"model": "h", "rule": "rejection", "threshold_acc": 2}},
            "[draft] threshold_acc is 2; it must be in 0..1",
        ),
        (
            {"model": "m", "draft": {"model": "h", "simulated_accept_length": 9}},
            "[draft] simulated_accept_length is 9; it must be in 1..5",
        ),
        (
            {"model": "m", "draft": {"method": "none", "simulated_accept_length": 2}},
            "[draft] simulated_accept_length is 2, but nothing drafts",
        ),
        (
            {"model": "m", "draft": {"method": "ngram", "overlap": "on"}},
            "method 'ngram' makes its drafts on the host",
        ),
        (
            {"model": "m", "draft": {"method": "eagle3", "model": "h", "token_map": "t"}},
            "an EAGLE-3 head brings its own",
        ),
        (
            {"model": "m", "draft": {"method": "none", "ngram_corpus": "c.txt"}},
            "[draft] ngram_corpus is 'c.txt', but no n-gram drafter guesses: method is 'none', "
            "fallback 'none'; use method 'ngram', or fallback 'ngram'",
        ),
        (
            {"model": "m", "draft": {"method": "none", "fallback": "ngram", "ngram_corpus": "c"}},
            "[draft] ngram_corpus is 'c', but no n-gram drafter guesses",
        ),
        (
            {"model": "m", "draft": {"method": "standalone", "model": "d", "ngram_corpus": "c"}},
            "[draft] ngram_corpus is 'c', but no n-gram drafter guesses",
        ),
        (
            {"model": "m", "draft": {"model": "d", "ngram_corpus": "c"}},
            "[draft] ngram_corpus is 'c', but no n-gram drafter guesses",
        ),
        (
            {
                "model": "m",
                "draft": {"method": "ngram", "num_steps": 2, "topk": 2, "num_draft_tokens": 9},
            },
            "num_steps=2 and topk=2 has 7 nodes at most",
        ),
        ({"model": "m", "draft": {"topk": 33}}, "'draft.topk' is 33"),
        (
            {"model": "m", "draft": {"method": "ngram", "topk": 2, "num_draft_tokens": 1}},
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
    assert load_config(
        None, {"model": "m", **parse_speculative_config('{"model": "d"}')}
    ).draft == (DraftSection(method="auto", model="d"))


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


@pytest.mark.parametrize(
    ("draft", "device", "tree"),
    [
        ({"method": "eagle3", "model": "h"}, "cuda:0", (5, 4, 8)),
        ({"method": "eagle", "model": "h"}, "cuda", (5, 4, 8)),
        ({"method": "eagle3", "model": "h"}, "cpu", (3, 2, 5)),
        ({"method": "standalone", "model": "d"}, "cuda", (4, 1, 5)),
        ({"method": "standalone", "model": "d", "placement": "colocated"}, "cuda", (3, 1, 4)),
        ({"method": "ngram"}, "cuda", (4, 1, 5)),
        ({"method": "eagle3", "model": "h", "num_steps": 3}, "cuda", (3, 4, 13)),
        ({"method": "eagle3", "model": "h", "topk": 3}, "cpu", (3, 3, 10)),
        ({"method": "eagle3", "model": "h", "num_draft_tokens": 6}, "cuda", (5, 4, 6)),
        ({"method": "eagle3", "model": "h", "topk": 1}, "cuda", (5, 1, 6)),
    ],
)
def test_a_tree_not_asked_for_suits_the_method_and_the_device(
    draft: dict[str, Any], device: str, tree: tuple[int, int, int]
) -> None:
    spec = DraftSection(**draft).spec_config(device)
    assert (spec.num_steps, spec.topk, spec.num_draft_tokens) == tree


def test_heads_are_colocated_and_models_decoupled_unless_asked_for() -> None:
    head = DraftSection(method="eagle3", model="h")
    assert (head.is_colocated, head.is_decoupled) == (True, False)
    assert head.spec_config().is_colocated
    draft = DraftSection(method="standalone", model="d")
    assert (draft.is_colocated, draft.is_decoupled) == (False, True)
    assert not draft.spec_config().is_colocated
    beside = DraftSection(method="standalone", model="d", placement="colocated")
    assert (beside.is_colocated, beside.is_decoupled) == (True, False)
    assert beside.spec_config().is_colocated


def test_a_chain_with_another_number_of_nodes_is_set_right_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    draft = DraftSection(method="ngram", num_steps=2, num_draft_tokens=9)
    assert not caplog.records
    assert draft.spec_config().num_draft_tokens == 3
    assert "num_draft_tokens=9 was set to 3" in caplog.text


def test_every_field_of_a_draft_has_a_key_in_the_known_json_shape() -> None:
    text = '{"model": "h", "rule": "rejection", "adaptive": false, "num_steps": 3}'
    draft = load_config(None, {"model": "m", **parse_speculative_config(text)}).draft
    assert (draft.rule, draft.adaptive, draft.num_steps) == ("rejection", False, 3)


def test_a_target_is_told_to_be_deterministic_and_its_draft_need_not_be() -> None:
    draft = {"method": "standalone", "model": "d", "placement": "decoupled"}
    config = parse_config({"model": "m", "deterministic": True, "draft": draft})
    assert [spec.settings.deterministic for spec in target_specs(config, "cpu")] == [True]
    assert [spec.settings.deterministic for spec in draft_specs(config, "cpu")] == [False]
    plain = parse_config({"model": "m"})
    assert not target_specs(plain, "cpu")[0].settings.deterministic
