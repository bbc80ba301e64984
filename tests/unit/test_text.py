"""The tokenizer and chat templates agree with transformers."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from paceline.cluster.front.text import TextCodec
from paceline.worker.errors import ConfigError, InvalidRequest

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "héllo <b> & 'x'"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "bye"},
]

TEMPLATES = {
    "whitespace control and loops": (
        "{%- for m in messages -%}\n"
        "  {%- if loop.first %}{{ bos_token }}{% endif %}\n"
        "  {% if m.role == 'assistant' %}\n"
        "A: {{ m['content'] | trim }}{{ eos_token }}\n"
        "  {% else %}\n"
        "{{ m['role'] | upper }}: {{ m['content'] }}\n"
        "  {% endif %}\n"
        "{%- endfor %}\n"
        "{% if add_generation_prompt %}A:{% endif %}"
    ),
    "tojson keeps HTML and other scripts": (
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.content }}{% break %}{% endfor %}"
    ),
    "generation blocks": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    ),
    "namespaces and absent tools": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}{% if tools %}tools{% endif %}{% if documents is not none %}docs{% endif %}"
    ),
    "dates": "{{ strftime_now('%Y') | length }}",
}


def variant(model: Path, path: Path, **config: Any) -> Path:
    """A copy of the tokenizer files with changed entries of tokenizer_config.json."""
    path.mkdir()
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(model / name, path / name)
    old = json.loads((model / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(old | config))
    return path


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_transformers_renders_them(
    tiny_model: Path, tmp_path: Path, name: str, add_generation_prompt: bool
) -> None:
    path = variant(tiny_model, tmp_path / "model", chat_template=TEMPLATES[name])
    expected = AutoTokenizer.from_pretrained(path).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    codec = TextCodec.load(path)
    assert codec.render_chat(CHAT, add_generation_prompt=add_generation_prompt) == expected


def test_special_token_spelled_out_in_a_message_is_read_as_transformers_reads_it(
    tiny_model: Path,
) -> None:
    chat = [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb"}]
    expected = AutoTokenizer.from_pretrained(tiny_model).apply_chat_template(
        chat, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    codec = TextCodec.load(tiny_model)
    ids = codec.encode(codec.render_chat(chat), add_special_tokens=False)
    assert ids == expected
    assert ids.count(0) == 3


def test_a_template_file_wins_over_the_config(tiny_model: Path, tmp_path: Path) -> None:
    path = variant(tiny_model, tmp_path / "model", chat_template="from the config")
    (path / "chat_template.jinja").write_text("from the file")
    assert TextCodec.load(path).render_chat(CHAT) == "from the file"


def test_of_named_templates_the_default_is_taken(tiny_model: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    path = variant(tiny_model, tmp_path / "model", chat_template=named)
    assert TextCodec.load(path).render_chat(CHAT) == "D"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": {"content": "<|bos|>", "__type": "AddedToken"}},
    ],
    ids=str,
)
def test_flags_beside_a_tokenizer_file_change_nothing_as_in_transformers(
    tiny_model: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    path = variant(tiny_model, tmp_path / "model", **config)
    reference = AutoTokenizer.from_pretrained(path)
    codec = TextCodec.load(path)
    text = "héllo <|im_end|>"
    assert codec.encode(text) == reference(text)["input_ids"]
    without = reference(text, add_special_tokens=False)["input_ids"]
    assert codec.encode(text, add_special_tokens=False) == without


def test_a_post_processor_of_the_file_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    path = variant(tiny_model, tmp_path / "model")
    data = json.loads((path / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, sequence],
        "pair": [bos, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(data))
    codec = TextCodec.load(path)
    assert codec.encode("a")[0] == 1
    assert codec.encode("a") == AutoTokenizer.from_pretrained(path)("a")["input_ids"]


def test_a_saved_limit_does_not_cut_prompts(tiny_model: Path, tmp_path: Path) -> None:
    path = variant(tiny_model, tmp_path / "model")
    data = json.loads((path / "tokenizer.json").read_text())
    data["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (path / "tokenizer.json").write_text(json.dumps(data))
    assert len(TextCodec.load(path).encode("a" * 50)) == 50


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_a_template_that_says_no_is_the_requests_fault(
    tiny_model: Path, tmp_path: Path, source: str
) -> None:
    codec = TextCodec.load(variant(tiny_model, tmp_path / "model", chat_template=source))
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        codec.render_chat(CHAT)
    assert caught.value.field == "messages"


def test_a_template_cannot_reach_out_of_its_sandbox(tiny_model: Path, tmp_path: Path) -> None:
    source = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    codec = TextCodec.load(variant(tiny_model, tmp_path / "model", chat_template=source))
    with pytest.raises(InvalidRequest):
        codec.render_chat(CHAT)


def test_a_broken_template_is_refused_at_load(tiny_model: Path, tmp_path: Path) -> None:
    path = variant(tiny_model, tmp_path / "model", chat_template="{% if %}")
    with pytest.raises(ConfigError, match="Jinja"):
        TextCodec.load(path)


def test_a_model_without_a_template_has_no_chat(tiny_model: Path, tmp_path: Path) -> None:
    codec = TextCodec.load(variant(tiny_model, tmp_path / "model", chat_template=None))
    assert not codec.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        codec.render_chat(CHAT)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        TextCodec.load(tmp_path)


async def test_a_long_text_does_not_hold_up_the_event_loop(tiny_model: Path) -> None:
    codec = TextCodec.load(tiny_model)
    text = "hello world " * 20_000
    task = asyncio.ensure_future(codec.encode_async(text))
    num_turns = 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert await task == codec.encode(text)
    assert num_turns > 10
    codec.close()


def test_the_least_number_of_tokens_is_a_lower_bound(tiny_model: Path) -> None:
    codec = TextCodec.load(tiny_model)
    for text in ("", "a", "héllo" * 50, "<|im_start|>" * 9):
        assert codec.min_num_tokens(text) <= len(codec.encode(text))
    assert codec.min_num_tokens("x" * 10_000) > 0
