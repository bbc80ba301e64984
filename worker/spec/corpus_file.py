"""The file of a corpus: what it may hold, and its texts as token ids within limits.

Knows no tokenizer; who has one passes it.
"""

import json
import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.worker.errors import ConfigError

log = logging.getLogger(__name__)

Text = str | list[int]  # written out, or as token ids


@dataclass(frozen=True, slots=True)
class CorpusLimits:
    max_bytes: int = 64 << 20  # of the file
    # Kept: 48 MiB. Of 0.8M tokens of code one core tokenised 1.3 s and sorted 0.4 s.
    max_tokens: int = 4_194_304
    piece_chars: int = 65_536  # tokenised at once; a text is cut there, at the end of a line


def read_corpus(
    path: str | Path, vocab_size: int, limits: CorpusLimits = CorpusLimits()
) -> list[Text]:
    """The texts of a file: one, or of a .jsonl one per line, {"text": …} or {"input_ids": […]}.

    Raises: ConfigError: the file cannot be read, is larger than the limit, holds no text or
    something else, or ids outside the vocabulary.
    """
    path = Path(path)
    content = _read(path, limits.max_bytes)
    if path.suffix.lower() == ".jsonl":
        lines = enumerate(content.split("\n"), start=1)
        texts = [
            _parse(line, f"{path}:{number}", vocab_size) for number, line in lines if line.strip()
        ]
    else:
        texts = [content]
    texts = [text for text in texts if text]
    if not texts:
        raise ConfigError(f"corpus '{path}' is empty; give a file with text, or none")
    return texts


def encode_corpus(
    path: str | Path,
    encode: Callable[[str], list[int]],
    vocab_size: int,
    tell: Callable[[float], None],
    limits: CorpusLimits = CorpusLimits(),
) -> "list[array[int]]":
    """The texts of a file as token ids, from the first on as many as the limit lets in.

    Args:
        encode: text to token ids, without special tokens around it.
        tell: is told which part is done, 0 to 1.
    Raises: ConfigError: as `read_corpus`, or `encode` makes ids outside the vocabulary.
    """
    texts = read_corpus(path, vocab_size, limits)
    size = sum(map(len, texts))  # of characters and ids: enough to tell shares
    room, done, told = limits.max_tokens, 0.0, 0
    kept = []
    log.info("reading corpus path=%s texts=%d", path, len(texts))
    for text in texts:
        ids = array("I")
        for piece in _pieces(text, limits.piece_chars):
            if not room:
                break
            new_ids = piece if isinstance(piece, list) else encode(piece)
            _check_ids(new_ids, f"the tokenizer, in corpus '{path}',", vocab_size)
            taken = new_ids[:room]
            ids.extend(taken)
            room -= len(taken)
            done += len(piece) * (len(taken) / len(new_ids) if new_ids else 1.0)
            tell(done / size)
            if int(4 * done / size) > told:
                told = int(4 * done / size)
                log.info("reading corpus path=%s done=%d%%", path, 25 * told)
        if ids:
            kept.append(ids)
    if not kept:
        raise ConfigError(f"corpus '{path}' has no token; give a file with text, or none")
    if done < size:
        log.warning(
            "cut corpus path=%s kept_tokens=%d kept_texts=%d left_out_texts=%d left_out=%.1f%%: "
            "the limit is %d tokens",
            path,
            limits.max_tokens - room,
            len(kept),
            len(texts) - len(kept),
            100 * (1 - done / size),
            limits.max_tokens,
        )
    return kept


def _read(path: Path, max_bytes: int) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"corpus '{path}' is not a file; give a text file or a .jsonl")
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
            size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"corpus '{path}' cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise ConfigError(
            f"corpus '{path}' has {size} bytes, the limit is {max_bytes}; keep the part that is "
            "most like the answers"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"corpus '{path}' is not UTF-8 at byte {error.start}; convert it to UTF-8"
        ) from error


def _parse(line: str, where: str, vocab_size: int) -> Text:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"corpus '{where}' is not JSON: {error}") from error
    match found:
        case {"text": str(text)} if "input_ids" not in found and _is_unicode(text):
            return text
        case {"input_ids": [*ids]} if "text" not in found and all(type(i) is int for i in ids):
            _check_ids(ids, f"corpus '{where}'", vocab_size)
            return ids
    raise ConfigError(
        f'corpus \'{where}\' has neither a "text" that is one nor a list of "input_ids"; each '
        'line is {"text": "…"} or {"input_ids": [1, 2]}'
    )


def _is_unicode(text: str) -> bool:
    """JSON can spell half of a character, which no tokenizer takes."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_ids(ids: list[int], what: str, vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        outside = next(i for i in ids if not 0 <= i < vocab_size)
        raise ConfigError(
            f"{what} leads to token {outside}, but the target has tokens 0 to {vocab_size - 1}; "
            "use a corpus made for this target, as text at best"
        )


def _pieces(text: Text, piece_chars: int) -> Iterator[Text]:
    """Long texts in parts, each but the last up to an end of line where it has one."""
    if isinstance(text, list):
        yield text
        return
    start = 0
    while start < len(text):
        end = start + piece_chars
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
