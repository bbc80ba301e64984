"""The front's HTTP face: OpenAI's routes and the operator's, as one ASGI app.

uvicorn serves it beside gRPC, and Ray Serve mounts the same app. Bodies are parsed here rather
than by FastAPI, so that a refusal names the field and has OpenAI's shape.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI
from google.protobuf.json_format import MessageToDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from paceline.cluster.front.answer import Chunk, Complete
from paceline.cluster.front.auth import ApiKeys
from paceline.cluster.front.errors import Cancelled, to_http
from paceline.cluster.front.grpc_api import server_info
from paceline.cluster.front.http_edge import (
    Edge,
    JsonResponse,
    cancel_and_wait,
    error_response,
    read_body,
    run_while_connected,
    wait_disconnect,
)
from paceline.cluster.front.metrics import CONTENT_TYPE
from paceline.cluster.front.openai_replies import ReplyShape
from paceline.cluster.front.openai_types import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SamplingBody,
    TokenizeBody,
    parse_body,
    plain_messages,
    plain_prompt,
    refuse_unsupported,
)
from paceline.cluster.front.requests import GenerationInput
from paceline.cluster.front.service import GenerationCore
from paceline.cluster.version import version
from paceline.worker.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    PacelineError,
    Unavailable,
)
from paceline.worker.step import FinishReason

log = logging.getLogger(__name__)

# What OpenAI's completions route generates when nothing is said.
_COMPLETION_MAX_TOKENS = 16


def build_http_app(
    core: GenerationCore,
    *,
    api_keys: Sequence[str] = (),
    is_ready: Callable[[], bool] | None = None,
) -> FastAPI:
    """`is_ready` answers /health and /ready; by default, that the front is not draining."""
    app = FastAPI(title="Paceline", version=version(), openapi_url=None)
    routes = _Routes(core, is_ready or (lambda: not core.is_draining))
    for methods, path, endpoint in (
        ("POST", "/v1/chat/completions", routes.chat),
        ("POST", "/v1/completions", routes.completions),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{name:path}", routes.model),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/v1/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("POST", "/v1/detokenize", routes.detokenize),
        ("GET", "/health", routes.health),
        ("GET", "/ready", routes.health),
        ("GET", "/live", routes.live),
        ("GET", "/ping", routes.live),
        ("GET", "/version", routes.version),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/server_info", routes.server_info),
    ):
        app.add_route(path, endpoint, methods=[methods])
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(PacelineError, _answer_error)
    app.add_middleware(Edge, keys=ApiKeys(api_keys))
    return app


class _Routes:
    def __init__(self, core: GenerationCore, is_ready: Callable[[], bool]) -> None:
        self._core = core
        self._is_ready = is_ready
        self._started_unix_s = int(time.time())

    async def chat(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        refuse_unsupported(body)
        sampling = body.sampling()
        if body.max_completion_tokens is not None:
            if body.max_tokens not in (None, body.max_completion_tokens):
                raise InvalidRequest(
                    f"max_tokens is {body.max_tokens} and max_completion_tokens is "
                    f"{body.max_completion_tokens}; send one of them",
                    "max_completion_tokens",
                )
            sampling = replace(sampling, max_tokens=body.max_completion_tokens)
        asked = GenerationInput(
            messages=plain_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            sampling=sampling,
            request_id=request.state.request_id,
            model=body.model or "",
            priority=body.priority or 0,
        )
        return await self._generate(request, asked, body, is_chat=True)

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        refuse_unsupported(body)
        text, ids = plain_prompt(body)
        asked = GenerationInput(
            text=text,
            input_ids=ids,
            sampling=body.sampling(),
            request_id=request.state.request_id,
            model=body.model or "",
            priority=body.priority or 0,
            default_max_tokens=_COMPLETION_MAX_TOKENS,
        )
        return await self._generate(request, asked, body, is_chat=False)

    async def _body(self, request: Request, body_type: type[Any]) -> Any:  # Any: the type given
        return parse_body(await read_body(request, self._core.limits.max_body_bytes), body_type)

    async def _generate(
        self, request: Request, asked: GenerationInput, body: SamplingBody, *, is_chat: bool
    ) -> Response:
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest(
                "stream_options is set but stream is not true; set stream or leave it out",
                "stream_options",
            )
        shape = ReplyShape(
            req_id=asked.request_id,
            model=asked.model or self._core.model.names[0],
            created=int(time.time()),
            is_chat=is_chat,
        )
        if body.stream:
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(self._core, asked, shape, with_usage=with_usage)
        response = await run_while_connected(self._whole(asked, shape), request.receive)
        return response or Response(status_code=499)  # nobody reads it

    async def _whole(self, asked: GenerationInput, shape: ReplyShape) -> Response:
        async with aclosing(self._core.generate(asked)) as events:
            async for event in events:
                if isinstance(event, Complete):
                    _refuse_abort(event, shape.req_id)
                    return JsonResponse(shape.whole(event))
        raise InternalError(f"request '{shape.req_id}' ended without an answer")

    async def models(self, request: Request) -> Response:
        names = self._core.model.names
        return JsonResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._core.model.check_name(name)
        return JsonResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:  # Any: JSON
        model = self._core.model
        return {
            "id": name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "paceline",
            "root": model.names[0],
            "parent": None,
            "max_model_len": model.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        body: TokenizeBody = await self._body(request, TokenizeBody)
        self._core.model.check_name(body.model or "")
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await self._core.tokenize_chat(
                plain_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        else:
            ids = await self._core.tokenize(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        limit = self._core.model.max_model_len
        return JsonResponse({"tokens": ids, "count": len(ids), "max_model_len": limit})

    async def detokenize(self, request: Request) -> Response:
        body: DetokenizeBody = await self._body(request, DetokenizeBody)
        self._core.model.check_name(body.model or "")
        text = self._core.detokenize(
            body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
        )
        return JsonResponse({"prompt": text})

    async def health(self, request: Request) -> Response:
        if self._is_ready():
            return JsonResponse({"status": "ok"})
        what = "draining" if self._core.is_draining else "waiting for a group that is ready"
        raise Unavailable(f"this front is {what}", 1.0)

    async def live(self, request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JsonResponse({"version": version()})

    async def metrics(self, request: Request) -> Response:
        try:
            status = await self._core.status()
        except Unavailable:
            status = None  # the front's own numbers are worth a scrape
        return PlainTextResponse(self._core.metrics.render(status), media_type=CONTENT_TYPE)

    async def server_info(self, request: Request) -> Response:
        info = await server_info(self._core)
        return JsonResponse(MessageToDict(info, preserving_proto_field_name=True))


class EventStream(Response):
    """An answer as server-sent events. The status line waits for the first event, so that a
    refusal has its own; an error after it is one event, then the end."""

    def __init__(
        self,
        core: GenerationCore,
        asked: GenerationInput,
        shape: ReplyShape,
        *,
        with_usage: bool,
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._core = core
        self._asked = asked
        self._shape = shape
        self._with_usage = with_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send_events(scope, receive, send))
        watcher = asyncio.ensure_future(wait_disconnect(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                await sender
        finally:
            # Cancelling the sender closes the generator, and that aborts the request.
            await cancel_and_wait(sender)
            await cancel_and_wait(watcher)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        async with aclosing(self._core.generate(self._asked)) as events:
            try:
                async for event in events:
                    if isinstance(event, Complete):
                        _refuse_abort(event, self._shape.req_id)
                    if not has_started:
                        has_started = True
                        await self._send_start(send)
                    await self._send_all(send, self._objects(event))
            except PacelineError as error:
                if not has_started:
                    await error_response(error)(scope, receive, send)
                    return
                await self._send_all(send, [to_http(error).body])
            except Exception:
                if not has_started:
                    raise
                log.exception("stream failed req_id=%s", self._shape.req_id)
                failure = InternalError(f"request '{self._shape.req_id}' failed inside the server")
                await self._send_all(send, [to_http(failure).body])
            else:
                await self._send_data(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        first = self._shape.first()
        if first is not None:
            await self._send_all(send, [self._with_null_usage(first)])

    def _objects(self, event: Chunk | Complete) -> list[dict[str, Any]]:  # Any: JSON
        if isinstance(event, Chunk):
            return [self._with_null_usage(self._shape.text(event.text))] if event.text else []
        last = [self._with_null_usage(self._shape.last(event))]
        return [*last, self._shape.usage(event)] if self._with_usage else last

    def _with_null_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        return chunk | {"usage": None} if self._with_usage else chunk

    async def _send_all(self, send: Send, objects: list[dict[str, Any]]) -> None:  # Any: JSON
        for item in objects:
            await self._send_data(send, msgspec.json.encode(item))

    async def _send_data(self, send: Send, data: bytes) -> None:
        body = b"data: " + data + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _refuse_abort(complete: Complete, req_id: str) -> None:
    """OpenAI's finish reasons know no abort, so over HTTP it is an error."""
    if complete.finish_reason is FinishReason.ABORT:
        num_tokens = len(complete.output_ids)
        raise Cancelled(f"request '{req_id}' was aborted after {num_tokens} tokens")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PacelineError)
    return error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"no route {request.method} {request.url.path}"))
    answer = to_http(InvalidRequest(f"{request.method} {request.url.path}: {error.detail}"))
    return JsonResponse(answer.body, error.status_code, dict(error.headers or {}))
