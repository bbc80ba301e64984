"""The file of a corpus: its texts, its limits, and what it is refused for."""

import json
import logging
from pathlib import Path

import pytest

from paceline.cluster.group.corpus import load_corpus
from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.corpus_file import CorpusLimits, encode_corpus, read_corpus

VOCAB_SIZE = 300


def by_byte(text: str) -> list[int]:
    return list(text.encode())


def write(tmp_path: Path, content: str | bytes, name: str = "c.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def encoded(path: Path, **limits: int) -> list[list[int]]:
    texts = encode_corpus(path, by_byte, VOCAB_SIZE, lambda part: None, CorpusLimits(**limits))
    return [ids.tolist() for ids in texts]


def test_a_file_is_one_text(tmp_path: Path) -> None:
    assert read_corpus(write(tmp_path, "\ufeffÄb\n\nc"), VOCAB_SIZE) == ["Äb\n\nc"]


def test_each_line_of_a_jsonl_is_a_text_written_out_or_as_ids(tmp_path: Path) -> None:
    lines = [{"text": "a\u2028b", "id": 7}, {"input_ids": [1, 299]}, {"text": ""}, {"text": "c"}]
    path = write(tmp_path, "\n\n".join(map(json.dumps, lines)) + "\r\n", "c.jsonl")
    assert read_corpus(path, VOCAB_SIZE) == ["a\u2028b", [1, 299], "c"]
    raw = write(tmp_path, json.dumps({"text": "a\u2028b"}, ensure_ascii=False), "raw.jsonl")
    assert read_corpus(raw, VOCAB_SIZE) == ["a\u2028b"]


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("", "c.txt", "is empty"),
        ("\n \n", "c.jsonl", "is empty"),
        ('{"text": ""}', "c.jsonl", "is empty"),
        (b"ab\xffc", "c.txt", "is not UTF-8 at byte 2"),
        ("x" * 101, "c.txt", "has 101 bytes, the limit is 100"),
        ('{"text": "a"}\n{', "c.jsonl", "c.jsonl:2' is not JSON"),
        ("[" * 99, "c.jsonl", "c.jsonl:1' is not JSON"),
        ('["a"]', "c.jsonl", "has neither"),
        ('{"text": 1}', "c.jsonl", "has neither"),
        ('{"text": "\\ud800"}', "c.jsonl", "has neither"),
        ('{"input_ids": [1.0]}', "c.jsonl", "has neither"),
        ('{"input_ids": [true]}', "c.jsonl", "has neither"),
        ('{"input_ids": "12"}', "c.jsonl", "has neither"),
        ('{"text": "a", "input_ids": [1]}', "c.jsonl", "has neither"),
        ('{"input_ids": [1, 300]}', "c.jsonl", "leads to token 300, but the target has tokens 0"),
        ('{"input_ids": [-1]}', "c.jsonl", "leads to token -1"),
    ],
)
def test_a_file_that_is_no_corpus_is_refused_with_the_reason(
    content: str | bytes, name: str, words: str, tmp_path: Path
) -> None:
    path = write(tmp_path, content, name)
    with pytest.raises(ConfigError) as caught:
        read_corpus(path, VOCAB_SIZE, CorpusLimits(max_bytes=100))
    assert words in caught.value.message
    assert str(path) in caught.value.message


def test_a_file_that_is_not_there_or_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_corpus(tmp_path / "none.txt", VOCAB_SIZE)
    with pytest.raises(ConfigError, match="is not a file"):
        read_corpus(tmp_path, VOCAB_SIZE)


@pytest.mark.parametrize("piece_chars", [1, 4, 5, 999])
def test_a_long_text_is_tokenised_in_pieces_and_stays_one(tmp_path: Path, piece_chars: int) -> None:
    path = write(tmp_path, "ab\ncdefghi\n\nj")
    assert encoded(path, piece_chars=piece_chars) == [by_byte("ab\ncdefghi\n\nj")]


def test_a_piece_ends_with_a_line_where_it_can(tmp_path: Path) -> None:
    pieces: list[str] = []

    def encode(text: str) -> list[int]:
        pieces.append(text)
        return by_byte(text)

    path = write(tmp_path, "ab\ncd\nefghijk\n")
    encode_corpus(path, encode, VOCAB_SIZE, lambda part: None, CorpusLimits(piece_chars=6))
    assert pieces == ["ab\ncd\n", "efghij", "k\n"]


def test_tokens_beyond_the_limit_are_left_out_and_the_log_says_how_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"text": "abcd"}, {"input_ids": [1, 2, 3, 4]}, {"text": "efgh"}]
    path = write(tmp_path, "\n".join(map(json.dumps, lines)), "c.jsonl")
    with caplog.at_level(logging.WARNING):
        assert encoded(path, max_tokens=6) == [by_byte("abcd"), [1, 2]]
    (record,) = caplog.records
    message = record.getMessage()
    assert "kept_tokens=6 kept_texts=2 left_out_texts=1 left_out=50.0%" in message
    assert "the limit is 6 tokens" in message


def test_all_of_a_corpus_at_the_limit_is_kept_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "abcdef")
    with caplog.at_level(logging.WARNING):
        assert encoded(path, max_tokens=6, piece_chars=2) == [by_byte("abcdef")]
    assert caplog.records == []


def test_progress_is_told_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[float] = []
    path = write(tmp_path, "abcdefgh")
    with caplog.at_level(logging.INFO):
        encode_corpus(path, by_byte, VOCAB_SIZE, told.append, CorpusLimits(piece_chars=1))
    assert told == [i / 8 for i in range(1, 9)]
    shown = [record.getMessage().rpartition("=")[2] for record in caplog.records]
    assert shown == ["1", "25%", "50%", "75%", "100%"]


def test_a_tokenizer_of_ids_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"the tokenizer, in corpus .* leads to token 300"):
        encode_corpus(path, lambda text: [300], VOCAB_SIZE, lambda part: None)


def test_a_text_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no token"):
        encode_corpus(write(tmp_path, "a"), lambda text: [], VOCAB_SIZE, lambda part: None)


def test_the_models_own_tokenizer_reads_the_corpus(tmp_path: Path, tiny_model: Path) -> None:
    from tokenizers import Tokenizer

    model = load_model_config(tiny_model)
    path = write(tmp_path, "to be or not to be")
    told: list[tuple[str, float]] = []
    corpus = load_corpus(
        SpecConfig("ngram", ngram_corpus=str(path)), model, lambda *at: told.append(at)
    )
    assert corpus is not None
    ids = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).encode("to be or not").ids
    assert corpus.num_tokens == 18
    found = corpus.find(ids[:10], min_len=8, max_places=8, max_next=2)
    assert found == (10, [ids[10:12]])
    assert told == [("corpus", 1.0)]
    assert load_corpus(SpecConfig("ngram"), model) is None
