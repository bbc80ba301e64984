"""The built-in prompts of `paceline verify-lossless`: talk, code and lists, in any vocabulary."""

from pathlib import Path

from paceline.cluster.front.text import TextCodec

_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that adds the numbers from 1 to n.",
    "List the planets of the solar system, one per line.",
    "Translate to French: the train leaves at nine in the morning.",
    "Continue: 1, 1, 2, 3, 5, 8, 13,",
    "What is the difference between a list and a tuple in Python?",
    "Tell a short story about a lighthouse keeper and a lost whale.",
    "Summarise in one line: water expands when it freezes, so ice floats.",
)
MAX_PROMPTS = len(_PROMPTS)


def load_prompts(model_dir: Path, num_prompts: int) -> list[list[int]]:
    """Token ids, as a chat where the model has a template.

    Raises: ConfigError: the tokenizer cannot be read.
    """
    codec = TextCodec.load(model_dir)
    try:
        return [_encode(codec, text) for text in _PROMPTS[:num_prompts]]
    finally:
        codec.close()


def _encode(codec: TextCodec, text: str) -> list[int]:
    if not codec.has_chat_template:
        return codec.encode(text)
    chat = codec.render_chat([{"role": "user", "content": text}])
    return codec.encode(chat, add_special_tokens=False)
