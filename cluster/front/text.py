"""Text to token ids and back: tokenizer, chat template, and what of an answer may be sent when.

Knows a model directory's tokenizer files, not requests, servers or weights. The tokenizer is the
`tokenizers` library's; chat templates render as `transformers` renders them.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jinja2
from tokenizers import AddedToken, Tokenizer

from paceline.cluster.front.chat_template import ChatTemplate
from paceline.cluster.front.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from paceline.worker.errors import ConfigError, InvalidRequest

Result = TypeVar("Result")
# Encoding takes about 1 us per character: a longer text would hold up every stream of the front.
_MAX_INLINE_CHARS = 2048


class TextCodec:
    """One model's tokenizer. Safe to share; encoding of long texts runs on threads of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        name: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._name = name
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._is_byte_level = _is_byte_level(tokenizer)
        self._byte_table: dict[int, str | bytes] = {}
        self._max_token_chars = _max_token_chars(tokenizer, added) if self._is_byte_level else 0
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

    @classmethod
    def load(cls, model_dir: str | Path) -> "TextCodec":
        """Raises: ConfigError: the directory has no tokenizer.json, or it cannot be read."""
        path = Path(model_dir)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"model directory {path} has no tokenizer.json; convert its tokenizer with "
                "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error
        # Limits saved with it were a training run's. Its post-processor is kept: that, and not the
        # config's add_bos_token, says which tokens stand around a text.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(path / "tokenizer_config.json")
        special = _special_tokens(config, path)
        source = ChatTemplate.find_source(path, config)
        template = None if source is None else ChatTemplate(source, special)
        return cls(tokenizer, chat_template=template, name=path.name)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As `encode`; a long text does not block the event loop."""
        return await self._run(
            len(text), lambda: self.encode(text, add_special_tokens=add_special_tokens)
        )

    async def _run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        if num_chars <= _MAX_INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the text's tokens without encoding it; 0 where none is known."""
        return len(text) // self._max_token_chars if self._max_token_chars else 0

    def render_chat(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a chat; encode it without adding special tokens.

        A special token that a message spells out, "<|im_end|>" say, becomes that token, as it does
        with transformers' `apply_chat_template`. Who passes on text of others must filter it.

        Raises: InvalidRequest: the model has no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequest(
                f"model '{self._name}' has no chat template; send the prompt as text or token ids",
                "messages",
            )
        try:
            return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(
                f"the chat template of model '{self._name}' refuses the messages: {error}",
                "messages",
            ) from error

    async def render_chat_async(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """As `render_chat`; a long chat does not block the event loop."""
        return await self._run(
            sum(len(message["content"]) for message in messages),
            lambda: self.render_chat(messages, add_generation_prompt=add_generation_prompt),
        )

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh one, for one answer."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        if self._is_byte_level:
            return ByteDetokenizer(self._tokenizer, self._byte_table, skip)
        return WindowDetokenizer(self._tokenizer, skip)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _max_token_chars(tokenizer: Tokenizer, added: dict[int, AddedToken]) -> int:
    """Characters of text that one token can stand for; 0 where a token may swallow any number."""
    if tokenizer.normalizer is not None:
        return 0
    if any(token.lstrip or token.rstrip for token in added.values()):
        return 0
    # A byte-level token has one character per byte, so its length bounds its text's.
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)


def _read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _special_tokens(config: dict[str, Any], path: Path) -> dict[str, str]:
    """ "bos_token" and its like, as chat templates read them."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
    values = _read_json(path / "special_tokens_map.json") | config
    found = {}
    for name in (*names, "mask_token"):
        value = values.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found
