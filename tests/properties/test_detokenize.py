"""Pieces of text join to the decode of all ids, whatever the ids and the stop strings."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.cluster.front.answer import Answer
from paceline.cluster.front.detokenize import REPLACEMENT
from paceline.cluster.front.stops import StopChecker
from paceline.cluster.front.text import TextCodec
from tests.tiny import VOCAB_SIZE

SPECIAL = "<|end|>"


def byte_level() -> TextCodec:
    """As Llama 3, Qwen and SmolLM2: every byte is a token, some pairs of bytes too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([SPECIAL, *alphabet])}
    # Bytes of "é" and the first two of "漢": tokens that end inside or at a character.
    merges = [("Ã", "©"), ("æ", "¼")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("naïve 日本", special=False, normalized=False)])
    return TextCodec(tokenizer)


def byte_fallback() -> TextCodec:
    """As Llama 2: pieces with a marker for spaces, and single bytes for the rest."""
    pieces = ["<unk>", SPECIAL, "▁the", "▁", "a", "é", "漢"]
    vocab = {token: i for i, token in enumerate([*pieces, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return TextCodec(tokenizer)


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
TEXT = st.text(alphabet="ab é漢😀\n", max_size=12)


def pieces_of(codec: TextCodec, ids: list[int], *, skip: bool) -> list[str]:
    detokenizer = codec.detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 2), max_size=40), skip=st.booleans())
@example(ids=[0], skip=False)
def test_pieces_of_any_byte_level_ids_join_to_the_full_decode(ids: list[int], skip: bool) -> None:
    pieces = pieces_of(BYTE_LEVEL, ids, skip=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("codec", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "fallback"])
@given(text=TEXT)
def test_no_piece_of_valid_text_holds_a_broken_character(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text, add_special_tokens=False)
    pieces = pieces_of(codec, ids, skip=True)
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert "".join(pieces) == codec.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, BYTE_FALLBACK.vocab_size - 1), max_size=30))
def test_invalid_bytes_are_held_back_for_a_bounded_time(ids: list[int]) -> None:
    detokenizer = BYTE_FALLBACK.detokenizer()
    invalid = 7 + 0xFF
    pieces = [detokenizer.push(invalid) for _ in range(40)]
    assert sum(map(len, pieces)) >= 40 - 9
    pieces += [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.finish() != ""


def plain_stop(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The rule, written for a text that is known whole: the stop that completes first, and of
    those that complete together the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="abc", max_size=24),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4, unique=True),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include=st.booleans(),
)
@example(text="aab", stops=["aab", "ab"], cuts=[2], include=False)
def test_stops_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    checker = StopChecker(stops, include_stop=include)
    edges = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    sent = ""
    for start, end in itertools.pairwise(edges):
        sent += checker.push(text[start:end])
        if checker.matched is not None:
            break
        # Never sent what a stop string could still take back.
        assert plain_stop(text, stops, include=include)[0].startswith(sent)
    else:
        sent += checker.finish()
    assert (sent, checker.matched) == plain_stop(text, stops, include=include)


@given(
    ids=st.lists(st.integers(0, VOCAB_SIZE - 8), max_size=30),
    stops=st.lists(st.text(alphabet="ab ", min_size=1, max_size=3), max_size=3, unique=True),
    width=st.integers(1, 7),
    min_tokens=st.integers(0, 10),
)
def test_an_answer_does_not_depend_on_how_many_tokens_a_step_brings(
    ids: list[int], stops: list[str], width: int, min_tokens: int
) -> None:
    def answer(width: int) -> tuple[str, list[int], str | None]:
        found = Answer(BYTE_LEVEL.detokenizer(), StopChecker(stops), min_tokens=min_tokens)
        text = ""
        for start in range(0, len(ids), width):
            text += found.push(ids[start : start + width]).text
            if found.matched_stop is not None:
                break
        text += found.finish().text
        assert text == found.text
        return text, found.output_ids, found.matched_stop

    assert answer(width) == answer(1)
