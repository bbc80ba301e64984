"""What a deployment may ask of speculation, and that two vocabularies can be told apart."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError
from paceline.worker.spec.limits import (
    alloc_len_per_decode,
    check_spec_config,
    is_overlapped,
    max_tree_nodes,
    reserve_len,
    settle_spec_config,
)
from paceline.worker.spec.vocab import vocab_hash

TREE = SpecConfig("ngram", num_steps=3, topk=2, num_draft_tokens=6)
HEAD = replace(TREE, method="eagle3", draft_model="head")
STANDALONE = replace(TREE, method="standalone")
COLOCATED = replace(STANDALONE, placement="colocated")
REJECTION = replace(HEAD, rule="rejection")


def test_one_branch_makes_the_tree_a_chain_of_num_steps() -> None:
    chain = SpecConfig("ngram", num_steps=4, topk=1, num_draft_tokens=5)
    check_spec_config(chain)
    check_spec_config(replace(chain, num_draft_tokens=3))
    with pytest.raises(ConfigError, match="has 5 nodes at most"):
        check_spec_config(replace(chain, num_draft_tokens=6))


def test_a_tree_may_have_all_the_nodes_that_growth_can_offer() -> None:
    check_spec_config(TREE)
    assert max_tree_nodes(3, 2) == 11
    check_spec_config(replace(TREE, num_draft_tokens=11))


def test_without_a_method_the_rest_does_not_matter() -> None:
    check_spec_config(SpecConfig("none", num_steps=0, topk=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0; it must be in 1..64"),
        ({"topk": 33}, "topk is 33; it must be in 1..32"),
        ({"num_draft_tokens": 1}, "num_draft_tokens is 1; it must be in 2..1024"),
        ({"num_draft_tokens": 12}, "has 11 nodes at most"),
        ({"draft_timeout_s": 0.0}, "the draft's timeout is 0 s"),
        ({"draft_timeout_s": float("nan")}, "the draft's timeout is nan s"),
        ({"draft_timeout_s": float("inf")}, "the draft's timeout is inf s"),
    ],
)
def test_a_setting_out_of_bounds_is_named_with_its_limit(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_spec_config(replace(TREE, **changes))


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (REJECTION, {"threshold_single": 1.5}, "threshold_single is 1.5; it must be in 0..1"),
        (REJECTION, {"threshold_single": -0.1}, "threshold_single is -0.1; it must be in 0..1"),
        (REJECTION, {"threshold_acc": float("nan")}, "threshold_acc is nan; it must be in 0..1"),
        (HEAD, {"threshold_single": 0.5}, "rule 'coupled' knows no threshold"),
        (HEAD, {"threshold_acc": 0.5}, "rule 'coupled' knows no threshold"),
        (HEAD, {"simulated_accept_length": 0.5}, "must be in 1..4"),
        (HEAD, {"simulated_accept_length": 4.1}, "must be in 1..4"),
        (HEAD, {"simulated_accept_length": -1.0}, "must be in 1..4"),
        (HEAD, {"simulated_accept_length": float("nan")}, "must be in 1..4"),
        (HEAD, {"token_map": "map.json"}, "an EAGLE-3 head brings its own"),
        (STANDALONE, {"token_map": "map.json"}, "only EAGLE-1 and -2 heads take one"),
        (TREE, {"overlap": "on"}, "method 'ngram' makes its drafts on the host"),
        (
            HEAD,
            {"ngram_corpus": "c"},
            "method 'eagle3' makes no n-gram guesses; use method 'ngram'",
        ),
        (COLOCATED, {"ngram_corpus": "c"}, "method 'standalone' makes no n-gram guesses"),
        (STANDALONE, {"overlap": "on"}, "method 'standalone' makes its drafts on the host"),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_a_way_out(
    spec: SpecConfig, changes: dict[str, Any], message: str
) -> None:
    check_spec_config(spec)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_spec_config(replace(spec, **changes))


@pytest.mark.parametrize(
    "spec",
    [
        replace(REJECTION, threshold_single=0.0, threshold_acc=0.0),
        replace(HEAD, simulated_accept_length=1.0),
        replace(HEAD, simulated_accept_length=4.0, simulated_method="multinomial"),
        replace(HEAD, method="eagle", token_map="map.json"),
        replace(HEAD, overlap="on"),
        replace(TREE, ngram_corpus="c.txt"),
        replace(STANDALONE, ngram_corpus="c.txt"),
        replace(COLOCATED, overlap="on"),
    ],
)
def test_options_at_their_bounds_are_allowed(spec: SpecConfig) -> None:
    check_spec_config(spec)


@pytest.mark.parametrize("num_draft_tokens", [2, 4, 6, 1024])
def test_one_branch_is_made_a_whole_chain_and_said_so(
    num_draft_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    chain = replace(HEAD, num_steps=4, topk=1, num_draft_tokens=5)
    assert settle_spec_config(chain) == chain
    assert settle_spec_config(HEAD) == HEAD
    assert not caplog.records
    assert settle_spec_config(replace(chain, num_draft_tokens=num_draft_tokens)) == chain
    assert f"num_draft_tokens={num_draft_tokens}" in caplog.text


def test_a_step_may_write_as_much_as_its_drafts_or_its_tree_whichever_is_more() -> None:
    assert alloc_len_per_decode(replace(HEAD, num_steps=5, topk=4, num_draft_tokens=8)) == 20
    assert alloc_len_per_decode(replace(HEAD, num_steps=5, topk=1, num_draft_tokens=6)) == 6


def test_a_colocated_draft_reserves_a_step_or_two_where_steps_overlap() -> None:
    for spec, num_root_slots in ((HEAD, 0), (COLOCATED, 1)):
        assert spec.is_colocated
        assert reserve_len(spec, overlap=False) == 6 + num_root_slots
        assert reserve_len(spec, overlap=True) == 12 + num_root_slots
    for spec in (TREE, STANDALONE, SpecConfig()):
        assert not spec.is_colocated
        assert reserve_len(spec, overlap=True) == 0


def test_steps_overlap_on_a_gpu_unless_said_otherwise() -> None:
    assert is_overlapped(HEAD, "cuda:0")
    assert not is_overlapped(HEAD, "cpu")
    assert is_overlapped(replace(HEAD, overlap="on"), "cpu")
    assert not is_overlapped(replace(HEAD, overlap="off"), "cuda:0")
    assert not is_overlapped(STANDALONE, "cuda:0")


def _write_tokenizer(path: Path, vocab: Any, added: list[dict[str, Any]]) -> Path:
    path.mkdir()
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": added}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_models_of_one_vocabulary_have_one_hash(tiny_model: Path, tiny_draft: Path) -> None:
    assert vocab_hash(tiny_model) == vocab_hash(str(tiny_draft))
    assert len(vocab_hash(tiny_model)) == 32


def test_the_hash_sees_every_id_and_no_order_of_the_file(tmp_path: Path) -> None:
    vocabs: list[tuple[Any, list[dict[str, Any]]]] = [
        ({"a": 0, "b": 1}, []),
        ({"b": 1, "a": 0}, []),
        ({"a": 0}, [{"id": 1, "content": "b"}]),
        ([["a", -1.0], ["b", -2.0]], []),
        ({"a": 1, "b": 0}, []),
        ({"a": 0, "b": 2}, []),
        ({"a": 0, "b": 1}, [{"id": 2, "content": "c"}]),
        ({"ab": 0, "": 1}, []),
    ]
    hashes = [
        vocab_hash(_write_tokenizer(tmp_path / str(i), vocab, added))
        for i, (vocab, added) in enumerate(vocabs)
    ]
    assert len(set(hashes[:4])) == 1
    assert len(set(hashes[3:])) == 5


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"model": {"vocab": 7}}'])
def test_a_tokenizer_that_cannot_be_read_is_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        vocab_hash(tmp_path)


def test_a_directory_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        vocab_hash(tmp_path)
