"""Token ids of one answer to text, piece by piece, never breaking a character."""

import codecs
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The pieces of all `push` calls and of `finish`, joined, are the decode of all the ids."""

    def push(self, token_id: int) -> str:
        """The text that is now final; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: each token is a run of bytes, and UTF-8 says where a character
    ends. Exact, and of constant cost per token."""

    def __init__(
        self, tokenizer: Tokenizer, table: dict[int, str | bytes], skip_ids: frozenset[int]
    ) -> None:
        """`table` caches what ids stand for, whole characters as text and the rest as bytes; it
        may be shared by all detokenizers of a tokenizer."""
        self._tokenizer = tokenizer
        self._table = table
        self._skip_ids = skip_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False  # a character has begun and not ended

    def push(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        piece = self._table.get(token_id)
        if piece is None:
            piece = self._table[token_id] = _text_if_whole(token_bytes(self._tokenizer, token_id))
        if isinstance(piece, str):
            if not self._is_inside:
                return piece
            piece = piece.encode()
        text = self._utf8.decode(piece)
        self._is_inside = bool(self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other decoder: decodes a short window and sends what the last window had not.

    Where a tokenizer falls back to single bytes that turn out invalid only after complete
    characters were sent, those characters stay; the decode of the whole would replace them too.
    """

    # An incomplete character has at most 3 bytes, so at most 3 tokens at the end may change.
    _MAX_OPEN_TOKENS = 3
    _MAX_HELD_TOKENS = 8

    def __init__(self, tokenizer: Tokenizer, skip_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_ids = skip_ids
        self._context: list[int] = []  # already sent; a decoder may look back
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        self._held.append(token_id)
        text = self._new_text(len(self._held))
        if not text.endswith(REPLACEMENT):
            return self._send(text, len(self._held))
        if len(self._held) > self._MAX_HELD_TOKENS:
            num_sent = len(self._held) - self._MAX_OPEN_TOKENS
            return self._send(self._new_text(num_sent), num_sent)
        return ""

    def finish(self) -> str:
        return self._send(self._new_text(len(self._held)), len(self._held))

    def _new_text(self, num_held: int) -> str:
        held = self._held[:num_held]
        before = self._decode(self._context)
        text = self._decode(self._context + held)
        return text[len(before) :] if text.startswith(before) else self._decode(held)

    def _send(self, text: str, num_sent: int) -> str:
        if text:
            # Tokens without text of their own stay in the context, so that it is never empty of
            # the token whose text the next one continues.
            self._context = self._held[:num_sent]
        else:
            self._context = self._context + self._held[:num_sent]
        self._held = self._held[num_sent:]
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _text_if_whole(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of one id of a byte-level tokenizer; none for an id it does not know."""
    token = tokenizer.id_to_token(token_id)
    if token is None:
        return b""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:  # an added token, written as plain text
        return str(token).encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
