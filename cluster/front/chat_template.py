"""A model's chat template, rendered as `transformers` renders it.

Templates come with a model and are not trusted: they run in Jinja's immutable sandbox.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.worker.errors import ConfigError


class ChatTemplate:
    """Raises ConfigError when built from a source that is not a Jinja template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error
        self._special_tokens = special_tokens

    @staticmethod
    def find_source(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
        """chat_template.jinja, else the tokenizer's config; of several, the one named "default"."""
        file = path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        value = tokenizer_config.get("chat_template")
        if isinstance(value, list):
            named = {entry["name"]: entry["template"] for entry in value}
            value = named.get("default")
        return value if isinstance(value, str) else None

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Raises: jinja2.TemplateError: the template says no, or reads what is not there."""
        return self._template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,  # Any: JSON
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model never saw. Templates pass by position."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # templates mean local time
