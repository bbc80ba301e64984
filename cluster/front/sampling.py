"""Sampling parameters, checked and resolved. Pure."""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from paceline.cluster.front.quoting import check_text, shown_int
from paceline.cluster.front.served_model import ServedModel
from paceline.worker.errors import InvalidRequest
from paceline.worker.step import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
# Below this a float32 softmax is greedy already, and a division by it overflows.
_MIN_TEMPERATURE = 1e-5
_INT32 = 2**31


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


def seed_of(req_id: str) -> int:
    """The 64-bit seed of a request that brought none: the same id answers the same again."""
    return int.from_bytes(blake2b(req_id.encode(), digest_size=8).digest(), "little")


def resolve_sampling(
    asked: SamplingInput,
    model: ServedModel,
    *,
    req_id: str,
    prompt_len: int,
    default_max_tokens: int | None = None,
) -> SamplingParams:
    """The group's share of `asked`, each value checked.

    Args:
        default_max_tokens: where max_tokens is absent; None takes what the context leaves.
    Raises: InvalidRequest: the field, its value, the limit, the way out.
    """
    max_tokens = _max_tokens(asked.max_tokens, model, prompt_len, default_max_tokens)
    min_tokens = 0 if asked.min_tokens is None else asked.min_tokens
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(
            f"min_tokens is {shown_int(min_tokens)}, outside 0 to max_tokens ({max_tokens}); lower "
            "it or raise max_tokens",
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
        stop_token_ids=_stop_token_ids(asked.stop_token_ids, model),
        ignore_eos=bool(asked.ignore_eos),
        logit_bias=_logit_bias(asked.logit_bias, model),
    )


def _max_tokens(asked: int | None, model: ServedModel, prompt_len: int, default: int | None) -> int:
    left = model.max_model_len - prompt_len
    if asked is None:
        return left if default is None else min(default, left)
    if asked < 1:
        raise InvalidRequest(f"max_tokens is {shown_int(asked)}; ask for at least 1", "max_tokens")
    if asked > left:
        raise InvalidRequest(
            f"max_tokens is {shown_int(asked)}, but a prompt of {prompt_len} tokens leaves {left} "
            f"of the {model.max_model_len} of model '{model.names[0]}'; lower it, leave it out to "
            "take what is left, or shorten the prompt",
            "max_tokens",
        )
    return asked


def _stop_token_ids(ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(ids)} ids; send at most {MAX_STOP_TOKEN_IDS}",
            "stop_token_ids",
        )
    model.check_ids("stop_token_ids", ids)
    return tuple(ids)


def _logit_bias(biases: Mapping[int, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(biases)} entries; send at most {MAX_LOGIT_BIASES}",
            "logit_bias",
        )
    model.check_ids("logit_bias", tuple(biases))
    checked = (
        (i, _float(f"logit_bias[{i}]", bias, 0.0, -100.0, 100.0, way_out="0 is none"))
        for i, bias in sorted(biases.items())
    )
    return tuple(checked)


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
        raise InvalidRequest(
            f"top_k is {shown_int(value)}; use 1 or more, or 0 or -1 to keep all", "top_k"
        )
    return max(value, 0)


def _seed(value: int | None, req_id: str) -> int:
    """A negative seed, which OpenAI's API allows, counts as its 64-bit pattern."""
    if value is None:
        return seed_of(req_id)
    if not -(2**63) <= value < 2**64:
        raise InvalidRequest(f"seed is {shown_int(value)}; use a number of 64 bits", "seed")
    return value % 2**64


def resolve_stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings; send at most {MAX_STOPS}", "stop")
    for i, stop in enumerate(stops):
        check_text(f"stop[{i}]", stop)
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop[{i}] has {len(stop)} characters; use 1 to {MAX_STOP_CHARS}", "stop"
            )
    return tuple(stops)
