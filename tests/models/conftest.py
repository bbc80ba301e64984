"""Fixtures of the tests that hold output against a judge, or against itself."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.matrix import WriteLine

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2_prompts(smollm2: Path) -> list[list[int]]:
    """Lengths around the borders of pages and chunks, some that begin alike, chat, code, other
    scripts."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = json.loads((DATA / "exactness-prompts.json").read_text(encoding="utf-8"))
    return [tokenizer(text["text"])["input_ids"][: text.get("num_tokens")] for text in texts]


@pytest.fixture
def write_line(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> WriteLine:
    """To the terminal, although pytest captures output."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def write(line: str) -> None:
        if reporter is not None:
            with capfd.disabled():
                reporter.ensure_newline()
                reporter.write_line(line)

    return write
