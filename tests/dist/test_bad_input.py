"""Bad input through real servers: the same refusal, field and way out over gRPC and over HTTP."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2

from paceline.protos.v1 import common_pb2, generation_pb2
from tests.dist.conftest import Front, run_front

NAN = float("nan")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tiny_model: Path) -> AsyncIterator[Front]:
    """One for all: a refused request must leave a front as it was."""
    async with run_front(tiny_model) as started:
        yield started


@dataclass(frozen=True)
class Bad:
    """One request that must be refused.

    `sampling` is what both faces send; `text` or `ids` is the prompt; `says` are the value, the
    limit and the way out, each of which the message must name.
    """

    field: str
    says: tuple[str, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    text: str | None = "hello"
    ids: tuple[int, ...] | None = None
    only: str = ""  # "grpc" or "http" where the other cannot even say it


BAD = {
    "temperature below 0": Bad(
        "temperature", ("-0.5", "at least 0", "greedy"), {"temperature": -0.5}
    ),
    "temperature is not a number": Bad(
        "temperature", ("nan", "finite"), {"temperature": NAN}, only="grpc"
    ),
    "temperature beyond float32": Bad(
        "temperature", ("1e+39", "finite"), {"temperature": 1e39}, only="http"
    ),
    "top_p of 0": Bad("top_p", ("is 0;", "(0, 1]", "1 keeps all"), {"top_p": 0.0}),
    "top_p above 1": Bad("top_p", ("1.5", "(0, 1]"), {"top_p": 1.5}),
    "top_p that rounds to 0": Bad("top_p", ("1e-50", "(0, 1]"), {"top_p": 1e-50}, only="http"),
    "top_k below -1": Bad("top_k", ("-2", "-1 to keep all"), {"top_k": -2}),
    "min_p above 1": Bad("min_p", ("1.25", "[0, 1]"), {"min_p": 1.25}),
    "frequency_penalty": Bad("frequency_penalty", ("2.5", "[-2, 2]"), {"frequency_penalty": 2.5}),
    "presence_penalty": Bad("presence_penalty", ("-3", "[-2, 2]"), {"presence_penalty": -3.0}),
    "repetition_penalty of 0": Bad(
        "repetition_penalty", ("is 0;", "above 0", "1 is none"), {"repetition_penalty": 0.0}
    ),
    "max_tokens of 0": Bad("max_tokens", ("is 0;", "at least 1"), {"max_tokens": 0}),
    "max_tokens below 0": Bad("max_tokens", ("-1",), {"max_tokens": -1}, only="http"),
    "max_tokens beyond the context": Bad(
        "max_tokens", ("600", "507", "512", "shorten"), {"max_tokens": 600}
    ),
    "min_tokens above max_tokens": Bad(
        "min_tokens",
        ("9", "max_tokens (4)", "raise max_tokens"),
        {"min_tokens": 9, "max_tokens": 4},
    ),
    "too many stops": Bad("stop", ("17", "at most 16"), {"stop": ["x"] * 17}),
    "an empty stop": Bad("stop", ("stop[1]", "1 to 256"), {"stop": ["x", ""]}),
    "a stop too long": Bad("stop", ("257", "1 to 256"), {"stop": ["x" * 257]}),
    "stop id out of range": Bad(
        "stop_token_ids", ("264", "0 to 263", "'tiny'"), {"stop_token_ids": [3, 264]}
    ),
    "too many stop ids": Bad("stop_token_ids", ("257", "256"), {"stop_token_ids": [3] * 257}),
    "seed of more than 64 bits": Bad("seed", ("64 bits",), {"seed": 2**64}, only="http"),
    "logit_bias id out of range": Bad(
        "logit_bias", ("300", "0 to 263"), {"logit_bias": {300: 1.0}}
    ),
    "logit_bias out of range": Bad(
        "logit_bias", ("101", "[-100, 100]"), {"logit_bias": {5: 101.0}}
    ),
    "an empty prompt": Bad("prompt", ("empty", "at least one token"), text=""),
    "no token ids": Bad(
        "input_ids", ("empty", "at least one token"), text=None, ids=(), only="grpc"
    ),
    "token id out of range": Bad(
        "input_ids", ("input_ids[2]", "264", "0 to 263"), text=None, ids=(1, 2, 264)
    ),
    "token id below 0": Bad("input_ids", ("-1", "0 to 263"), text=None, ids=(-1, 5), only="http"),
    "prompt longer than the context": Bad(
        "prompt",
        ("512 tokens", "'tiny'", "511", "shorten it: the model has no more positions"),
        text="x" * 512,
    ),
    "prompt far longer than the context": Bad(
        "prompt", ("at least", "tokens", "511", "shorten"), text="x" * 200_000
    ),
    "ids longer than the context": Bad(
        "input_ids", ("600 tokens", "511"), text=None, ids=(5,) * 600
    ),
}


def cases(face: str) -> list[Any]:
    return [pytest.param(bad, id=name) for name, bad in BAD.items() if bad.only in ("", face)]


async def grpc_error(front: Front, request: generation_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request).read()
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> tuple[Any, Any]:
    """(ErrorInfo, BadRequest) of an error."""
    status = status_pb2.Status.FromString(
        dict(error.trailing_metadata())["grpc-status-details-bin"]
    )
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad_request)
    return info, bad_request


@pytest.mark.parametrize("bad", cases("grpc"))
async def test_bad_input_over_grpc_is_invalid_argument(front: Front, bad: Bad) -> None:
    num_before = len(front.controller.submitted)
    request = generation_pb2.GenerateRequest(
        sampling_params=common_pb2.SamplingParams(**bad.sampling)
    )
    if bad.ids is not None:
        request.tokenized.input_ids.extend(bad.ids)
        request.tokenized.SetInParent()
    else:
        request.text = bad.text
    error = await grpc_error(front, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    info, bad_request = details_of(error)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "paceline")
    assert [violation.field for violation in bad_request.field_violations] == [bad.field]
    for part in bad.says:
        assert part in error.details()
    assert len(front.controller.submitted) == num_before  # nothing was spent on it


@pytest.mark.parametrize("bad", cases("http"))
async def test_bad_input_over_http_is_400(front: Front, bad: Bad) -> None:
    num_before = len(front.controller.submitted)
    body = dict(bad.sampling)
    if "logit_bias" in body:
        body["logit_bias"] = {str(key): value for key, value in body["logit_bias"].items()}
    body["prompt"] = bad.text if bad.ids is None else list(bad.ids)
    reply = await front.http.post("/v1/completions", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == bad.field
    for part in bad.says:
        assert part in error["message"]
    assert len(front.controller.submitted) == num_before


async def test_an_unknown_model_is_not_found_over_both(front: Front) -> None:
    error = await grpc_error(front, generation_pb2.GenerateRequest(text="x", model="gpt-9"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "'gpt-9'" in error.details()
    assert "tiny, tiny-alias" in error.details()
    reply = await front.http.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"})
    assert reply.status_code == 404
    assert "tiny-alias" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "model"
    assert (await front.http.get("/v1/models/gpt-9")).status_code == 404


async def test_an_alias_is_served_over_both(front: Front) -> None:
    request = generation_pb2.GenerateRequest(text="x", model="tiny-alias")
    request.sampling_params.max_tokens = 1
    assert (await front.stub.Generate(request).read()).complete.text == "x"
    reply = await front.http.post("/v1/completions", json={"prompt": "x", "model": "tiny-alias"})
    assert reply.json()["model"] == "tiny-alias"


async def test_no_input_at_all_is_refused(front: Front) -> None:
    error = await grpc_error(front, generation_pb2.GenerateRequest())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text, token ids or messages" in error.details()
    reply = await front.http.post("/v1/completions", json={})
    assert reply.status_code == 400


@pytest.mark.parametrize("request_id", ["two words", "x" * 257, "naïve"])
async def test_a_request_id_that_cannot_travel_is_refused(front: Front, request_id: str) -> None:
    error = await grpc_error(front, generation_pb2.GenerateRequest(text="x", request_id=request_id))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)[1].field_violations[0].field == "request_id"
    reply = await front.http.get("/version", headers={"x-request-id": request_id.encode()})
    assert reply.status_code == 400
    assert "leave it out" in reply.json()["error"]["message"]


async def test_chat_input_is_checked_over_grpc(front: Front) -> None:
    request = generation_pb2.GenerateRequest()
    request.chat.SetInParent()
    error = await grpc_error(front, request)
    assert "messages is empty" in error.details()
    request.chat.messages.add(role="wizard", content="hi")
    error = await grpc_error(front, request)
    assert "messages[0].role is 'wizard'" in error.details()
    assert "system, user, assistant, tool" in error.details()


async def test_a_refused_request_leaves_nothing_behind(front: Front) -> None:
    request = generation_pb2.GenerateRequest(text="", request_id="again")
    await grpc_error(front, request)
    assert front.server.core.req_ids() == ([], [])
    good = generation_pb2.GenerateRequest(text="x", request_id="again")
    good.sampling_params.max_tokens = 1
    assert (await front.stub.Generate(good).read()).complete.text == "x"


HTTP_BAD: dict[str, tuple[str, bytes, int, str | None, tuple[str, ...]]] = {
    "unknown field": (
        "/v1/completions",
        b'{"prompt":"x","temprature":1}',
        400,
        "temprature",
        ("'temprature'", "did you mean 'temperature'?"),
    ),
    "unknown field inside a message": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"x","mood":1}]}',
        400,
        "messages[0].mood",
        ("'messages[0].mood'", "remove it"),
    ),
    "malformed JSON": ("/v1/completions", b'{"prompt":', 400, None, ("not valid JSON",)),
    "NaN is not JSON": (
        "/v1/completions",
        b'{"prompt":"x","temperature":NaN}',
        400,
        None,
        ("not valid JSON",),
    ),
    "deep nesting": ("/v1/completions", b'{"n":' + b"[" * 100_000, 400, None, ("not valid JSON",)),
    "not an object": ("/v1/completions", b"[1]", 400, None, ("object", "array")),
    "wrong type": (
        "/v1/completions",
        b'{"prompt":"x","max_tokens":"3"}',
        400,
        "max_tokens",
        ("'max_tokens'", "int", "str"),
    ),
    "number out of range": (
        "/v1/completions",
        b'{"prompt":"x","temperature":1e999}',
        400,
        "temperature",
        ("'temperature'", "out of range"),
    ),
    "an integer of thousands of digits": (
        "/v1/completions",
        b'{"prompt":"x","max_tokens":' + b"9" * 4000 + b"}",
        400,
        "max_tokens",
        ("max_tokens", "more than 70 bits"),
    ),
    "an id of thousands of digits": (
        "/v1/completions",
        b'{"prompt":[5,' + b"9" * 4000 + b"]}",
        400,
        "input_ids",
        ("input_ids[1]", "0 to 263"),
    ),
    "missing field": ("/v1/chat/completions", b"{}", 400, "messages", ("'messages' is missing",)),
    "no messages": (
        "/v1/chat/completions",
        b'{"messages":[]}',
        400,
        "messages",
        ("empty", "at least one message"),
    ),
    "an image": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}',
        400,
        "messages[0].content[0]",
        ("'image_url'", "'text'"),
    ),
    "a lone surrogate": (
        "/v1/completions",
        b'{"prompt":"a\\ud800"}',
        400,
        None,
        ("not valid JSON",),
    ),
    "ids and text in one prompt": (
        "/v1/completions",
        b'{"prompt": [1, "a"]}',
        400,
        "prompt",
        ("mixes token ids", "one list of token ids"),
    ),
    "two prompts": (
        "/v1/completions",
        b'{"prompt":["a","b"]}',
        400,
        "prompt",
        ("2 prompts", "one per request"),
    ),
    "a bias on no id": (
        "/v1/completions",
        b'{"prompt":"x","logit_bias":{"the":1}}',
        400,
        "logit_bias",
        ("'the'", "token ids in decimal"),
    ),
    "two limits": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"x"}],"max_tokens":3,"max_completion_tokens":4}',
        400,
        "max_completion_tokens",
        ("send one of them",),
    ),
    "usage without a stream": (
        "/v1/completions",
        b'{"prompt":"x","stream_options":{"include_usage":true}}',
        400,
        "stream_options",
        ("set stream",),
    ),
    "tokenize neither": ("/tokenize", b"{}", 400, "prompt", ("either prompt or messages",)),
    "detokenize out of range": (
        "/detokenize",
        b'{"tokens":[264]}',
        400,
        "token_ids",
        ("264", "0 to 263"),
    ),
}


@pytest.mark.parametrize("name", HTTP_BAD)
async def test_a_bad_body_is_400_and_names_the_field(front: Front, name: str) -> None:
    path, data, status, param, says = HTTP_BAD[name]
    reply = await front.http.post(path, content=data)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    for part in says:
        assert part in error["message"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("n", 2),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "end"),
        ("logprobs", 1),
        ("prompt_logprobs", 0),
        ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "json_object"}),
        ("return_token_ids", True),
    ],
)
async def test_a_known_option_that_is_not_served_is_refused(
    front: Front, option: str, value: Any
) -> None:
    reply = await front.http.post("/v1/completions", json={"prompt": "x", option: value})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == option
    assert "does not support" in error["message"]
    assert "leave it out" in error["message"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("chat_template_kwargs", {"a": 1}),
    ],
)
async def test_a_chat_option_that_is_not_served_is_refused(
    front: Front, option: str, value: Any
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], option: value}
    reply = await front.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == option


async def test_options_that_ask_for_nothing_are_welcome(front: Front) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "n": 1,
        "logprobs": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "someone",
        "stop": None,
    }
    assert (await front.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_over_the_limit_is_413_with_the_limit(
    front: Front, is_announced: bool
) -> None:
    data = b'{"prompt":"' + b"x" * (600 * 1024) + b'"}'

    async def in_parts() -> Any:
        for start in range(0, len(data), 65536):
            yield data[start : start + 65536]

    content = data if is_announced else in_parts()
    reply = await front.http.post("/v1/completions", content=content)
    assert reply.status_code == 413
    assert str(1 << 19) in reply.json()["error"]["message"]


async def test_unknown_routes_and_methods_have_openais_shape(front: Front) -> None:
    missing = await front.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert "/v1/nothing" in missing.json()["error"]["message"]
    wrong = await front.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"]
