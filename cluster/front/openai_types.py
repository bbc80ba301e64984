"""The JSON bodies that the HTTP face takes: OpenAI's fields and vLLM's extras.

A field that is known but not served yet is typed `Any` and refused by value, in words; a field
that nobody knows is refused by name. Nothing is ignored in silence.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from paceline.cluster.front.sampling import SamplingInput
from paceline.worker.errors import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Any = None  # Any: refused by `type`
    input_audio: Any = None  # Any: as above
    file: Any = None  # Any: as above


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: Any = None  # Any: refused unless null
    audio: Any = None  # Any: as above
    tool_calls: Any = None  # Any: as above
    function_call: Any = None  # Any: as above


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both generating routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None
    # A name for the caller's own end user; it changes no answer.
    user: str | None = None
    # Known, not served yet. Any: the value only decides between "absent" and a refusal.
    n: Any = None
    logprobs: Any = None
    spaces_between_special_tokens: Any = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    return_token_ids: Any = None
    response_format: Any = None

    def sampling(self) -> SamplingInput:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingInput(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop=stop,
            stop_token_ids=self.stop_token_ids or (),
            logit_bias=_logit_bias(self.logit_bias or {}),
        )


class CompletionBody(SamplingBody, kw_only=True):
    # Text or token ids; or a list that holds one of either.
    prompt: str | list[str | int | list[int]] | None = None
    best_of: Any = None  # Any: refused, as those above
    echo: Any = None
    suffix: Any = None


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    top_logprobs: Any = None  # Any: refused, as those above
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    service_tier: Any = None
    store: Any = None
    metadata: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


# Field -> values that ask for nothing, beside null.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "return_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "metadata": ({},),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
}
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>.*?)`(?P<where> - at .*)?$")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def parse_body(data: bytes, body_type: type[Body]) -> Body:
    """Raises: InvalidRequest: not JSON, an unknown field, a wrong type, a missing field."""
    try:
        return msgspec.json.decode(data, type=body_type)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), body_type) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error}; send one JSON object as application/json"
        ) from None


def _field_error(text: str, body_type: type[msgspec.Struct]) -> InvalidRequest:
    unknown = _UNKNOWN_FIELD.match(text)
    path = _PATH.search(text)
    prefix = path["path"] if path else ""
    if unknown:
        name = unknown["field"]
        field = f"{prefix}.{name}" if prefix else name
        known = sorted(f.encode_name for f in msgspec.structs.fields(body_type))
        close = [] if prefix else difflib.get_close_matches(name, known, n=1)
        way_out = f"did you mean '{close[0]}'?" if close else "remove it"
        return InvalidRequest(f"unknown field '{_short(field)}'; {way_out}", field)
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        field = f"{prefix}.{missing[1]}" if prefix else missing[1]
        return InvalidRequest(f"field '{field}' is missing; send it", field)
    reason = _PATH.sub("", text)
    return InvalidRequest(
        f"field '{_short(prefix) or 'body'}': {_short(reason)}; send that type", prefix
    )


def refuse_unsupported(body: msgspec.Struct) -> None:
    """Raises: InvalidRequest: an option that is known but not served yet was asked for."""
    for name, harmless in _REFUSED.items():
        value = getattr(body, name, None)
        if value is None or any(_is_same(value, other) for other in harmless):
            continue
        raise InvalidRequest(
            f"{name} is {_short(repr(value))}, which this version does not support; leave it out",
            name,
        )


def plain_prompt(body: CompletionBody) -> tuple[str | None, list[int] | None]:
    """(text, None) or (None, ids). Raises: InvalidRequest: several prompts."""
    prompt = body.prompt
    if not isinstance(prompt, list):
        return prompt, None
    ids = [item for item in prompt if isinstance(item, int)]
    if prompt and len(ids) == len(prompt):
        return None, ids
    if ids:
        raise InvalidRequest(
            "prompt is a list that mixes token ids with other things; send a string or one list "
            "of token ids",
            "prompt",
        )
    if len(prompt) > 1:
        raise InvalidRequest(
            f"prompt is a list of {len(prompt)} prompts; this version takes one per request: "
            "send a string or one list of token ids",
            "prompt",
        )
    first = prompt[0] if prompt else ""
    return (None, first) if isinstance(first, list) else (str(first), None)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages as a chat template reads them. Raises: InvalidRequest: what is not text."""
    return [_plain_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain_message(where: str, message: Message) -> dict[str, str]:
    for name in ("refusal", "audio", "tool_calls", "function_call"):
        if getattr(message, name) is not None:
            raise InvalidRequest(
                f"{where}.{name} is not supported by this version; leave it out", f"{where}.{name}"
            )
    # OpenAI renamed "system" for its newer models; the templates of open models know the old name.
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _plain_content(f"{where}.content", message.content)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_content(where: str, content: str | list[TextPart] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{where} is null; send the message's text", where)
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"{where}[{i}] has type '{_short(part.type)}'; this model reads parts of type "
                "'text' with a 'text'",
                f"{where}[{i}]",
            )
    return "".join(part.text or "" for part in content)


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON has no integer keys: they come as decimal strings."""
    found = {}
    for key, bias in biases.items():
        if not re.fullmatch(r"-?[0-9]{1,19}", key):
            raise InvalidRequest(
                f"logit_bias has the key '{_short(key)}'; keys are token ids in decimal",
                "logit_bias",
            )
        found[int(key)] = bias
    return found


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
