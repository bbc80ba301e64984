"""What every HTTP request passes: its id, its key, its size, its errors. Plain ASGI."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.cluster.front.auth import ApiKeys
from paceline.cluster.front.errors import TooLarge, to_http
from paceline.cluster.front.requests import resolve_request_id
from paceline.worker.errors import InternalError, PacelineError

log = logging.getLogger(__name__)

# Probes and scrapers have no key.
OPEN_PATHS = frozenset(("/health", "/ping", "/live", "/ready", "/version", "/metrics"))


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # Any: JSON
        return msgspec.json.encode(content)


def error_response(error: PacelineError) -> Response:
    answer = to_http(error)
    return JsonResponse(answer.body, answer.status, answer.headers)


class Edge:
    """Wraps an ASGI app: accepts or makes X-Request-Id and echoes it, checks the key, and turns
    what escapes into an answer of OpenAI's shape."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False
        req_id = ""

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if req_id:
                    MutableHeaders(scope=message)["x-request-id"] = req_id
            await send(message)

        try:
            headers = Headers(scope=scope)
            req_id = resolve_request_id(headers.get("x-request-id", ""))
            scope.setdefault("state", {})["request_id"] = req_id
            if scope["path"] not in OPEN_PATHS:
                self._keys.check(headers.get("authorization", ""))
            await self._app(scope, receive, send_with_id)
        except PacelineError as error:
            if has_started:
                raise
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            log.exception("http request failed req_id=%s path=%s", req_id, scope["path"])
            if not has_started:
                failure = InternalError(f"request '{req_id}' failed inside the server; see its log")
                await error_response(failure)(scope, receive, send_with_id)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises: TooLarge: over the limit, by its header or as it comes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    parts = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(num_bytes, max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(num_bytes: int, max_bytes: int) -> TooLarge:
    return TooLarge(
        f"the body has at least {num_bytes} bytes, the limit is {max_bytes}; shorten it or raise "
        "max_body_bytes"
    )


async def run_while_connected(
    work: Coroutine[Any, Any, Response], receive: Callable[[], Awaitable[Message]]
) -> Response | None:
    """The work's response; None, with the work cancelled, when the client left first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        await cancel_and_wait(task)
        await cancel_and_wait(watcher)


async def wait_disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_and_wait(task: "asyncio.Future[Any]") -> None:
    """Ends a task of ours; its own error, if any, was or will be seen by who awaits it."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
