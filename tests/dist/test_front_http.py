"""The front's HTTP face, through a real uvicorn: OpenAI's shapes, streams, disconnects."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from paceline.protos.v1 import common_pb2, generation_pb2
from paceline.worker.errors import Overloaded, Unavailable
from tests.dist.conftest import Front
from tests.fake_cluster import DEADLINE_ERROR, poll

HELLO = [{"role": "user", "content": "hello"}]
ECHO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
SPOKEN = "user\nhello\nassistant\n"  # without special tokens


async def events_of(front: Front, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of each server-sent event, decoded; the last is "[DONE]" or an error."""
    async with front.http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in reply.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def test_a_completion_has_openais_shape(front: Front) -> None:
    reply = await front.http.post(
        "/v1/completions",
        json={"prompt": "hello", "max_tokens": 8},
        headers={"x-request-id": "my-id"},
    )
    assert reply.headers["x-request-id"] == "my-id"
    body = reply.json()
    assert body["id"] == "cmpl-my-id"
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"] == [
        {"index": 0, "text": "hellohel", "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 3,
        },
    }
    assert body["paceline"]["group_id"] == "target-0"
    assert body["paceline"]["queue_s"] == 0.25


async def test_a_completion_takes_token_ids_and_generates_16_by_default(front: Front) -> None:
    for prompt in ([5, 6], [[5, 6]]):
        reply = await front.http.post("/v1/completions", json={"prompt": prompt})
        assert reply.json()["usage"]["prompt_tokens"] == 2
        assert reply.json()["usage"]["completion_tokens"] == 16


async def test_a_chat_completion_has_openais_shape(front: Front) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 24}
    reply = (await front.http.post("/v1/chat/completions", json=body)).json()
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": SPOKEN}
    assert choice["finish_reason"] == "length"


async def test_content_in_parts_is_joined(front: Front) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 24}
    reply = (await front.http.post("/v1/chat/completions", json=body)).json()
    assert reply["choices"][0]["message"]["content"] == SPOKEN


async def test_a_stop_string_is_a_stop(front: Front) -> None:
    body = {"prompt": "one two", "max_tokens": 50, "stop": " t"}
    reply = (await front.http.post("/v1/completions", json=body)).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("one", "stop")


async def test_a_chat_stream_ends_with_its_reason_and_done(front: Front) -> None:
    events = await events_of(front, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 24})
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == SPOKEN
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert not any("usage" in c for c in chunks)


async def test_usage_comes_last_when_asked_for(front: Front) -> None:
    body = {"prompt": "é", "max_tokens": 4, "stream_options": {"include_usage": True}}
    events = await events_of(front, "/v1/completions", body)
    *chunks, last, done = events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(c["usage"] is None for c in chunks)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "éé"


async def test_an_error_before_the_first_event_has_its_own_status(front: Front) -> None:
    front.controller.error = Overloaded("the queue is full", 7.0)
    for stream in (True, False):
        body = {"prompt": "x", "stream": stream}
        reply = await front.http.post("/v1/completions", json=body)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "7"
        assert reply.json()["error"]["code"] == "overloaded"
    front.controller.error = Unavailable("no group is ready", 3.0)
    reply = await front.http.post("/v1/completions", json={"prompt": "x"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "3")


async def test_an_error_in_mid_stream_is_one_event_and_the_end(front: Front) -> None:
    front.leader.script.error_after = 3
    events = await events_of(front, "/v1/completions", {"prompt": "abcdef"})
    *chunks, last = events
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abc"
    assert last["error"]["code"] == "unavailable"
    assert "after 3 tokens" in last["error"]["message"]


async def test_a_deadline_is_504(front: Front) -> None:
    front.leader.script.error_after = 0
    front.leader.script.error = DEADLINE_ERROR
    reply = await front.http.post("/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 504


async def test_a_running_id_is_409(front: Front) -> None:
    front.leader.script.gate.clear()
    headers = {"x-request-id": "dup"}
    body = {"prompt": "x"}
    first = asyncio.ensure_future(front.http.post("/v1/completions", json=body, headers=headers))
    await poll(lambda: "dup" in front.leader.running)
    second = await front.http.post("/v1/completions", json=body, headers=headers)
    assert second.status_code == 409
    front.leader.script.gate.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(front: Front, stream: bool) -> None:
    front.leader.script.gate.clear()
    body = {"prompt": "x", "stream": stream, "max_tokens": 100}
    headers = {"x-request-id": "gone"}
    post = asyncio.ensure_future(front.http.post("/v1/completions", json=body, headers=headers))
    await poll(lambda: "gone" in front.leader.running)
    post.cancel()
    await poll(lambda: front.leader.aborts == ["gone"])
    await poll(lambda: front.controller.released == ["gone"])
    assert front.server.core.req_ids() == ([], [])


async def test_a_client_that_leaves_in_mid_stream_aborts_its_request(front: Front) -> None:
    front.leader.script.never_ends = True
    body = {"prompt": "x", "stream": True, "max_tokens": 100}
    headers = {"x-request-id": "gone"}
    async with front.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        async for line in reply.aiter_lines():
            assert line.startswith("data: ")
            break
    await poll(lambda: front.leader.aborts == ["gone"])
    await poll(lambda: front.controller.released == ["gone"])


async def test_a_client_that_leaves_the_queue_is_released(front: Front) -> None:
    front.controller.gate.clear()
    headers = {"x-request-id": "gone"}
    post = asyncio.ensure_future(
        front.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    )
    await poll(lambda: bool(front.controller.submitted))
    post.cancel()
    await poll(lambda: front.controller.released == ["gone"])
    assert not front.leader.requests


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_over_grpc_ends_an_http_request_as_499(front: Front, stream: bool) -> None:
    front.leader.script.gate.clear()
    post = asyncio.ensure_future(
        front.http.post(
            "/v1/completions",
            json={"prompt": "x", "stream": stream},
            headers={"x-request-id": "h1"},
        )
    )
    await poll(lambda: "h1" in front.leader.running)
    await front.stub.Abort(generation_pb2.AbortRequest(request_id="h1"))
    reply = await post
    assert reply.status_code == 499
    assert reply.json()["error"]["code"] == "cancelled"


async def test_models_lists_every_served_name(front: Front) -> None:
    reply = (await front.http.get("/v1/models")).json()
    assert [card["id"] for card in reply["data"]] == ["tiny", "tiny-alias"]
    assert reply["object"] == "list"
    card = (await front.http.get("/v1/models/tiny-alias")).json()
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "tiny", 512)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize_are_inverse(front: Front, prefix: str) -> None:
    reply = (await front.http.post(f"{prefix}/tokenize", json={"prompt": "héllo"})).json()
    assert (reply["count"], reply["max_model_len"]) == (6, 512)
    back = await front.http.post(f"{prefix}/detokenize", json={"tokens": reply["tokens"]})
    assert back.json() == {"prompt": "héllo"}
    chat = (await front.http.post(f"{prefix}/tokenize", json={"messages": HELLO})).json()
    back = await front.http.post(f"{prefix}/detokenize", json={"tokens": chat["tokens"]})
    assert back.json() == {"prompt": ECHO}


async def test_probes_follow_readiness(front: Front) -> None:
    for path in ("/health", "/ready", "/live", "/ping"):
        assert (await front.http.get(path)).status_code == 200
    await front.server.begin_drain()
    for path in ("/health", "/ready"):
        reply = await front.http.get(path)
        assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
    for path in ("/live", "/ping"):
        assert (await front.http.get(path)).status_code == 200


async def test_version_and_server_info_answer(front: Front) -> None:
    assert (await front.http.get("/version")).json()["version"]
    info = (await front.http.get("/server_info")).json()
    assert info["groups"][0]["group_id"] == "target-0"
    await front.controller.stop()
    assert (await front.http.get("/server_info")).status_code == 503


async def test_metrics_count_what_was_served(front: Front) -> None:
    await front.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8})
    await front.http.post("/v1/completions", json={"prompt": ""})
    front.leader.script.error_after = 2
    await front.http.post("/v1/completions", json={"prompt": "hello"})
    text = (await front.http.get("/metrics")).text
    for line in (
        'paceline_request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'paceline_request_failure_total{model_name="tiny",reason="unavailable"} 1.0',
        'paceline_admission_rejections_total{model_name="tiny",reason="invalid_request"} 1.0',
        'paceline_generation_tokens_total{model_name="tiny"} 10.0',
        'paceline_prompt_tokens_total{model_name="tiny"} 10.0',
        'paceline_prefix_cache_hits_total{model_name="tiny"} 3.0',
        'paceline_spec_decode_num_accepted_tokens_total{model_name="tiny"} 5.0',
        'paceline_num_requests_running{model_name="tiny"} 0.0',
        'paceline_kv_cache_usage_perc{model_name="tiny",replica="target-0"} 0.25',
        'paceline_time_to_first_token_seconds_count{model_name="tiny"} 2.0',
        'paceline_request_queue_time_seconds_sum{model_name="tiny"} 0.5',
    ):
        assert line in text.splitlines()
    await front.controller.stop()
    assert (await front.http.get("/metrics")).status_code == 200


async def test_metrics_show_how_a_decoupled_draft_fares(front: Front) -> None:
    text = (await front.http.get("/metrics")).text
    assert 'replica="target-0"' in text
    assert "paceline_decoupled_draft_late_total{" not in text
    front.leader.draft = common_pb2.DraftHealth(
        is_up=True, num_rounds=9, num_late_rounds=3, num_stale_rows=2, rtt_s=0.25
    )
    labels = '{model_name="tiny",replica="target-0"}'
    for is_up in (True, False):
        front.leader.draft.is_up = is_up
        text = (await front.http.get("/metrics")).text
        for line in (
            f"paceline_decoupled_draft_late_total{labels} 3.0",
            f"paceline_decoupled_draft_stale_total{labels} 2.0",
            f"paceline_decoupled_draft_rtt_seconds{labels} 0.25",
            f"paceline_decoupled_peer_up{labels} {float(is_up)}",
        ):
            assert line in text.splitlines()


async def test_an_unexpected_failure_is_500_without_a_traceback(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def explode(*args: Any, **kwargs: Any) -> list[int]:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(front.server.core, "tokenize", explode)
    reply = await front.http.post(
        "/tokenize", json={"prompt": "x"}, headers={"x-request-id": "boom"}
    )
    assert reply.status_code == 500
    assert "'boom'" in reply.json()["error"]["message"]
    assert "secret" not in reply.text
    assert "secret detail" in caplog.text


async def test_a_negative_seed_counts_as_its_bits(front: Front) -> None:
    reply = await front.http.post("/v1/completions", json={"prompt": "x", "seed": -1})
    assert reply.json()["paceline"]["seed"] == 2**64 - 1


async def test_openais_own_client_is_served(front: Front) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"{front.http_url}/v1",
        api_key="unused",
        http_client=httpx.AsyncClient(trust_env=False),
        max_retries=0,
    )
    async with client:
        assert [m.id async for m in client.models.list()] == ["tiny", "tiny-alias"]
        chat = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_completion_tokens=24, temperature=0
        )
        assert chat.choices[0].message.content == SPOKEN
        assert chat.usage.completion_tokens_details.accepted_prediction_tokens == 5
        stream = await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == SPOKEN
        assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 24
        completion = await client.completions.create(model="tiny", prompt="hello", max_tokens=8)
        assert completion.choices[0].text == "hellohel"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="x", top_p=7)
        assert bad.value.param == "top_p"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="x")
        front.controller.error = Overloaded("full", 1.0)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="x")
