"""What a user asked for, checked and resolved: nothing is absent in a `ResolvedReq`.

Both faces fill a `GenerationInput`; every rule on it is here, so gRPC and HTTP refuse the same
things in the same words. A message names the field, the value, the limit and the way out.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.cluster.front.quoting import check_text, shown, shown_int
from paceline.cluster.front.sampling import SamplingInput, resolve_sampling, resolve_stops
from paceline.cluster.front.served_model import ServedModel
from paceline.cluster.front.text import TextCodec
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.errors import InvalidRequest
from paceline.worker.step import SamplingParams

ROLES = ("system", "user", "assistant", "tool")
MAX_REQUEST_ID_CHARS = 256
_INT32 = 2**31


@dataclass(frozen=True, slots=True)
class FrontLimits:
    default_deadline_s: float = 600.0  # for a request without a deadline
    max_deadline_s: float = 3600.0  # a longer one is cut to it
    max_concurrent_reqs: int = 1024  # in one front, waiting and running
    controller_wait_s: float = 60.0  # how long a new request waits for a lost controller
    max_message_bytes: int = 256 * 1024 * 1024  # one gRPC message, both ways
    max_body_bytes: int = 32 * 1024 * 1024  # one HTTP body


@dataclass(frozen=True, slots=True)
class GenerationInput:
    """One request as the user wrote it. Exactly one of text, input_ids and messages is set."""

    text: str | None = None
    input_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    add_generation_prompt: bool = True
    sampling: SamplingInput = field(default_factory=SamplingInput)
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
        self._model.check_name(asked.model)
        req_id = resolve_request_id(asked.request_id)
        if not -_INT32 <= asked.priority < _INT32:
            raise InvalidRequest(
                f"priority is {shown_int(asked.priority)}; use {-_INT32} to {_INT32 - 1}",
                "priority",
            )
        prompt_ids = await self.prompt_ids(asked)
        sampling = asked.sampling
        params = resolve_sampling(
            sampling,
            self._model,
            req_id=req_id,
            prompt_len=len(prompt_ids),
            default_max_tokens=asked.default_max_tokens,
        )
        return ResolvedReq(
            req_id=req_id,
            prompt_ids=prompt_ids,
            params=params,
            stop=resolve_stops(sampling.stop),
            include_stop_str_in_output=bool(sampling.include_stop_str_in_output),
            skip_special_tokens=sampling.skip_special_tokens is not False,
            priority=asked.priority,
            deadline_unix_s=now_s + time_limit_s,
            time_limit_s=time_limit_s,
        )

    async def prompt_ids(self, asked: GenerationInput) -> list[int]:
        """Tokens of the prompt, few enough to leave room for one of the answer."""
        if asked.input_ids is not None:
            self._model.check_prompt_len(len(asked.input_ids), "input_ids")
            self._model.check_ids("input_ids", asked.input_ids)
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
        check_text(name, text)
        least = self._codec.min_num_tokens(text)
        if least >= self._model.max_model_len:  # without spending time on encoding it
            self._model.check_prompt_len(least, name, at_least=True)
        ids = await self._codec.encode_async(text, add_special_tokens=add_special_tokens)
        if fits_context:
            self._model.check_prompt_len(len(ids), name)
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
                    f"messages[{i}].role is '{shown(role)}'; use one of {', '.join(ROLES)}",
                    f"messages[{i}].role",
                )
            check_text(f"messages[{i}].content", message["content"])
        return await self._codec.render_chat_async(
            [dict(message) for message in messages], add_generation_prompt=add_generation_prompt
        )

    def _time_limit_s(self, asked_s: float | None) -> float:
        if asked_s is None:
            return self._limits.default_deadline_s
        return min(asked_s, self._limits.max_deadline_s)


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
            f"request_id {shown(ascii(request_id))} has a space or a character outside printable "
            "ASCII; use letters, digits and punctuation, or leave it out",
            "request_id",
        )
    return request_id
