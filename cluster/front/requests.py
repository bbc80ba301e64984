"""What a user asked for, checked and resolved: nothing is absent in a `ResolvedReq`.

Both faces fill a `GenerationInput`; every rule on it is here, so gRPC and HTTP refuse the same
things in the same words. A message names the field, the value, the limit and the way out.
"""

import math
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from paceline.cluster.front.text import TextCodec
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.errors import InvalidRequest, NotFound
from paceline.worker.step import SamplingParams

ROLES = ("system", "user", "assistant", "tool")
MAX_REQUEST_ID_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
# Below this a float32 softmax is greedy already, and a division by it overflows.
_MIN_TEMPERATURE = 1e-5
_UINT32 = 2**32
_INT32 = 2**31


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a front must know of its model."""

    names: tuple[str, ...]
    path: str
    architecture: str
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class FrontLimits:
    default_deadline_s: float = 600.0  # for a request without a deadline
    max_deadline_s: float = 3600.0  # a longer one is cut to it
    max_concurrent_reqs: int = 1024  # in one front, waiting and running
    controller_wait_s: float = 60.0  # how long a new request waits for a lost controller
    max_message_bytes: int = 256 * 1024 * 1024  # one gRPC message, both ways
    max_body_bytes: int = 32 * 1024 * 1024  # one HTTP body


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """Sampling as the user wrote it; None means absent."""

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
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One request as the user wrote it. Exactly one of text, input_ids and messages is set."""

    text: str | None = None
    input_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    add_generation_prompt: bool = True
    sampling: SamplingInput = SamplingInput()
    request_id: str = ""
    model: str = ""
    priority: int = 0
    time_limit_s: float | None = None
    # Used where max_tokens is absent; None takes what the context leaves.
    default_max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ResolvedReq:
    req_id: str
    prompt_ids: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    priority: int
    deadline_unix_s: float
    time_limit_s: float  # what the deadline was made from, for messages


def seed_of(req_id: str) -> int:
    """The 64-bit seed of a request that brought none: the same id answers the same again."""
    return int.from_bytes(blake2b(req_id.encode(), digest_size=8).digest(), "little")


class Resolver:
    def __init__(
        self,
        model: ServedModel,
        codec: TextCodec,
        limits: FrontLimits,
        clock: Clock | None = None,
    ) -> None:
        self._model = model
        self._codec = codec
        self._limits = limits
        self._clock = clock or SystemClock()

    async def resolve(self, asked: GenerationInput) -> ResolvedReq:
        """Raises: InvalidRequest, NotFound: what is wrong, where, and the way out."""
        now_s = self._clock.unix_s()
        time_limit_s = self._time_limit_s(asked.time_limit_s)
        self.check_model(asked.model)
        req_id = resolve_request_id(asked.request_id)
        _in_range("priority", asked.priority, -_INT32, _INT32 - 1)
        prompt_ids = await self.prompt_ids(asked)
        sampling = asked.sampling
        params = self._params(sampling, req_id, len(prompt_ids), asked.default_max_tokens)
        return ResolvedReq(
            req_id=req_id,
            prompt_ids=prompt_ids,
            params=params,
            stop=_check_stops(sampling.stop),
            include_stop_str_in_output=bool(sampling.include_stop_str_in_output),
            skip_special_tokens=sampling.skip_special_tokens is not False,
            priority=asked.priority,
            deadline_unix_s=now_s + time_limit_s,
            time_limit_s=time_limit_s,
        )

    def check_model(self, name: str) -> None:
        if name and name not in self._model.names:
            raise NotFound(
                f"model '{_show(name)}' is not served here; served: {', '.join(self._model.names)}"
            )

    async def prompt_ids(self, asked: GenerationInput) -> list[int]:
        """Tokens of the prompt, few enough to leave room for one of the answer."""
        if asked.input_ids is not None:
            self._check_prompt_len(len(asked.input_ids), "input_ids")
            self.check_ids("input_ids", asked.input_ids)
            return list(asked.input_ids)
        if asked.messages is not None:
            text = await self.render_chat(
                asked.messages, add_generation_prompt=asked.add_generation_prompt
            )
            name, add_special_tokens = "messages", False  # the template wrote them
        elif asked.text is not None:
            text, name, add_special_tokens = asked.text, "prompt", True
        else:
            raise InvalidRequest("no prompt was given; send text, token ids or messages", "prompt")
        return await self.encode(text, name, add_special_tokens=add_special_tokens)

    async def encode(
        self, text: str, name: str, *, add_special_tokens: bool, fits_context: bool = True
    ) -> list[int]:
        """Raises: InvalidRequest: no text, or more than `fits_context` allows."""
        if not text:
            raise InvalidRequest(f"{name} is empty; send at least one token", name)
        _check_text(name, text)
        least = self._codec.min_num_tokens(text)
        if least >= self._model.max_model_len:  # without spending time on encoding it
            self._check_prompt_len(least, name, at_least=True)
        ids = await self._codec.encode_async(text, add_special_tokens=add_special_tokens)
        if fits_context:
            self._check_prompt_len(len(ids), name)
        return ids

    async def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message", "messages")
        for i, message in enumerate(messages):
            role = message["role"]
            if role not in ROLES:
                raise InvalidRequest(
                    f"messages[{i}].role is '{_show(role)}'; use one of {', '.join(ROLES)}",
                    f"messages[{i}].role",
                )
            _check_text(f"messages[{i}].content", message["content"])
        return await self._codec.render_chat_async(
            [dict(message) for message in messages], add_generation_prompt=add_generation_prompt
        )

    def _check_prompt_len(self, num_tokens: int, name: str, *, at_least: bool = False) -> None:
        if num_tokens == 0:
            raise InvalidRequest(f"{name} is empty; send at least one token", name)
        limit = self._model.max_model_len - 1
        if num_tokens > limit:
            raise InvalidRequest(
                f"prompt has {'at least ' if at_least else ''}{num_tokens} tokens, model "
                f"'{self._model.names[0]}' accepts {limit} (its context of "
                f"{self._model.max_model_len} less one for the answer); shorten it or raise "
                "--max-model-len",
                name,
            )

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """Raises: InvalidRequest: an id is outside the vocabulary."""
        vocab_size = self._model.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
            raise InvalidRequest(
                f"{name}[{i}] is {ids[i]}, outside the vocabulary of model "
                f"'{self._model.names[0]}'; use ids from 0 to {vocab_size - 1}",
                name,
            )

    def _time_limit_s(self, asked_s: float | None) -> float:
        if asked_s is None:
            return self._limits.default_deadline_s
        return min(asked_s, self._limits.max_deadline_s)

    def _params(
        self,
        asked: SamplingInput,
        req_id: str,
        prompt_len: int,
        default_max_tokens: int | None,
    ) -> SamplingParams:
        max_tokens = self._max_tokens(asked.max_tokens, prompt_len, default_max_tokens)
        min_tokens = 0 if asked.min_tokens is None else asked.min_tokens
        if not 0 <= min_tokens <= max_tokens:
            raise InvalidRequest(
                f"min_tokens is {min_tokens}, outside 0 to max_tokens ({max_tokens}); lower it or "
                "raise max_tokens",
                "min_tokens",
            )
        temperature = _float("temperature", asked.temperature, 1.0, 0.0, way_out="0 is greedy")
        top_p = _float("top_p", asked.top_p, 1.0, 0.0, 1.0, low_is_open=True, way_out="1 keeps all")
        return SamplingParams(
            seed=_seed(asked.seed, req_id),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=0.0 if temperature < _MIN_TEMPERATURE else temperature,
            top_p=top_p,
            top_k=_top_k(asked.top_k),
            min_p=_float("min_p", asked.min_p, 0.0, 0.0, 1.0, way_out="0 keeps all"),
            frequency_penalty=_float(
                "frequency_penalty", asked.frequency_penalty, 0.0, -2.0, 2.0, way_out="0 is none"
            ),
            presence_penalty=_float(
                "presence_penalty", asked.presence_penalty, 0.0, -2.0, 2.0, way_out="0 is none"
            ),
            repetition_penalty=_float(
                "repetition_penalty",
                asked.repetition_penalty,
                1.0,
                0.0,
                low_is_open=True,
                way_out="1 is none",
            ),
            stop_token_ids=self._stop_token_ids(asked.stop_token_ids),
            ignore_eos=bool(asked.ignore_eos),
            logit_bias=self._logit_bias(asked.logit_bias),
        )

    def _max_tokens(self, asked: int | None, prompt_len: int, default: int | None) -> int:
        left = self._model.max_model_len - prompt_len
        if asked is None:
            return left if default is None else min(default, left)
        if asked < 1:
            raise InvalidRequest(f"max_tokens is {asked}; ask for at least 1", "max_tokens")
        if asked > left:
            raise InvalidRequest(
                f"max_tokens is {asked}, but a prompt of {prompt_len} tokens leaves {left} of the "
                f"{self._model.max_model_len} of model '{self._model.names[0]}'; lower it, leave "
                "it out to take what is left, or shorten the prompt",
                "max_tokens",
            )
        return asked

    def _stop_token_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(ids)} ids; send at most {MAX_STOP_TOKEN_IDS}",
                "stop_token_ids",
            )
        self.check_ids("stop_token_ids", ids)
        return tuple(ids)

    def _logit_bias(self, biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        if len(biases) > MAX_LOGIT_BIASES:
            raise InvalidRequest(
                f"logit_bias has {len(biases)} entries; send at most {MAX_LOGIT_BIASES}",
                "logit_bias",
            )
        self.check_ids("logit_bias", tuple(biases))
        checked = (
            (i, _float(f"logit_bias[{i}]", bias, 0.0, -100.0, 100.0, way_out="0 is none"))
            for i, bias in sorted(biases.items())
        )
        return tuple(checked)


def resolve_request_id(request_id: str) -> str:
    """The client's own id, or a fresh one. It travels in headers and logs: printable ASCII only."""
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(request_id)} characters; use at most {MAX_REQUEST_ID_CHARS}, "
            "or leave it out",
            "request_id",
        )
    if not all("!" <= char <= "~" for char in request_id):
        raise InvalidRequest(
            f"request_id {_show(ascii(request_id))} has a space or a character outside printable "
            "ASCII; use letters, digits and punctuation, or leave it out",
            "request_id",
        )
    return request_id


def _show(text: str) -> str:
    """A user's text as a message may quote it."""
    return text if len(text) <= 64 else text[:61] + "..."


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; use {low} to {high}", name)


def _float(
    name: str,
    value: float | None,
    default: float,
    low: float,
    high: float = math.inf,
    *,
    low_is_open: bool = False,
    way_out: str,
) -> float:
    """The value as float32, which is what travels to a group, checked after that rounding."""
    if value is None:
        return default
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, value)
    is_low = rounded <= low if low_is_open else rounded < low
    if math.isnan(rounded) or is_low or rounded > high or math.isinf(rounded):
        limit = (
            f"{'above' if low_is_open else 'at least'} {low:g}"
            if math.isinf(high)
            else f"in {'(' if low_is_open else '['}{low:g}, {high:g}]"
        )
        raise InvalidRequest(
            f"{name} is {value:g}; use a finite number {limit} ({way_out})",
            name.partition("[")[0],
        )
    return rounded


def _top_k(value: int | None) -> int:
    if value is None:
        return 0
    if not -1 <= value < _INT32:
        raise InvalidRequest(f"top_k is {value}; use 1 or more, or 0 or -1 to keep all", "top_k")
    return max(value, 0)


def _seed(value: int | None, req_id: str) -> int:
    """A negative seed, which OpenAI's API allows, counts as its 64-bit pattern."""
    if value is None:
        return seed_of(req_id)
    if not -(2**63) <= value < 2**64:
        raise InvalidRequest(f"seed is {value}; use a number of 64 bits", "seed")
    return value % 2**64


def _check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; send at most {MAX_STOPS}", "stop")
    for i, stop in enumerate(stops):
        _check_text(f"stop[{i}]", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop[{i}] has {len(stop)} characters; use 1 to {MAX_STOP_CHARS}", "stop"
            )
    return tuple(stops)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} has a lone surrogate at character {error.start}, which is not Unicode text; "
            "remove it",
            name,
        ) from None
