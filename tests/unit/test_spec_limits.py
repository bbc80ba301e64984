"""What a deployment may ask of speculation, and that two vocabularies can be told apart."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError
from paceline.worker.spec.limits import check_spec_config, max_tree_nodes
from paceline.worker.spec.vocab import vocab_hash

TREE = SpecConfig("ngram", num_steps=3, topk=2, num_draft_tokens=6)


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
