"""Our errors as a gRPC status and as an HTTP answer, and back from a status: the one map.

Every server of ours answers through it, public or internal, so an error raised in a leader
reaches the client with its kind, its field and its retry delay. What leaves is bounded (4 KiB of
details, less than gRPC's 8 KiB of metadata) and never holds a traceback.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import (  # type: ignore[import-untyped]  # ships neither stubs nor py.typed
    error_details_pb2,
    status_pb2,
)

from paceline.worker.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PacelineError,
    StaleEpoch,
    Unavailable,
)

log = logging.getLogger(__name__)

DOMAIN = "paceline"
DETAILS_KEY = "grpc-status-details-bin"
# The message travels twice (grpc-message, percent-encoded, and inside the details): 1 KiB keeps
# both under gRPC's default of 8 KiB of metadata even if no byte of it is ASCII.
MAX_MESSAGE_BYTES = 1024


class Unauthenticated(PacelineError):
    """No API key, or an unknown one."""


class PermissionDenied(PacelineError):
    """A key that is known but not an operator's."""


class Unsupported(PacelineError):
    """A call that this process has no use for."""


class TooLarge(PacelineError):
    """A message over the limit."""


class Cancelled(PacelineError):
    """The client, or somebody with the request's id, ended it."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    error: type[PacelineError]
    reason: str
    code: grpc.StatusCode
    http: int
    openai_type: str


_MAPPINGS = (
    _Mapping(
        InvalidRequest,
        "INVALID_REQUEST",
        grpc.StatusCode.INVALID_ARGUMENT,
        400,
        "invalid_request_error",
    ),
    _Mapping(NotFound, "NOT_FOUND", grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    _Mapping(
        AlreadyExists,
        "ALREADY_EXISTS",
        grpc.StatusCode.ALREADY_EXISTS,
        409,
        "invalid_request_error",
    ),
    _Mapping(
        Unauthenticated,
        "UNAUTHENTICATED",
        grpc.StatusCode.UNAUTHENTICATED,
        401,
        "authentication_error",
    ),
    _Mapping(
        PermissionDenied,
        "PERMISSION_DENIED",
        grpc.StatusCode.PERMISSION_DENIED,
        403,
        "permission_error",
    ),
    _Mapping(
        TooLarge, "TOO_LARGE", grpc.StatusCode.RESOURCE_EXHAUSTED, 413, "invalid_request_error"
    ),
    _Mapping(Overloaded, "OVERLOADED", grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    _Mapping(Unavailable, "UNAVAILABLE", grpc.StatusCode.UNAVAILABLE, 503, "server_error"),
    _Mapping(
        DeadlineExceeded,
        "DEADLINE_EXCEEDED",
        grpc.StatusCode.DEADLINE_EXCEEDED,
        504,
        "timeout_error",
    ),
    _Mapping(Cancelled, "CANCELLED", grpc.StatusCode.CANCELLED, 499, "cancelled"),
    _Mapping(
        Unsupported, "UNSUPPORTED", grpc.StatusCode.UNIMPLEMENTED, 501, "invalid_request_error"
    ),
    _Mapping(
        ConfigError,
        "CONFIG_ERROR",
        grpc.StatusCode.FAILED_PRECONDITION,
        400,
        "invalid_request_error",
    ),
    _Mapping(StaleEpoch, "STALE_EPOCH", grpc.StatusCode.FAILED_PRECONDITION, 409, "server_error"),
    _Mapping(InternalError, "INTERNAL", grpc.StatusCode.INTERNAL, 500, "server_error"),
)
_BY_CLASS = {m.error: m for m in _MAPPINGS}
_BY_REASON = {m.reason: m for m in _MAPPINGS}
# A status that did not come from us (a broken connection, gRPC's own limits).
_BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def _mapping_of(error: PacelineError) -> _Mapping:
    for cls in type(error).__mro__:
        if cls in _BY_CLASS:
            return _BY_CLASS[cls]
    return _BY_CLASS[InternalError]


def reason_of(error: PacelineError) -> str:
    """The error's kind in one lower-case word, for labels and bodies."""
    return _mapping_of(error).reason.lower()


def cut(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """`text`, shortened to `max_bytes` of UTF-8 with "..." at the cut."""
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    return data[: max_bytes - 3].decode(errors="ignore") + "..."


def to_status(
    error: PacelineError, *, req_id: str = "", num_tokens_sent: int = 0
) -> status_pb2.Status:
    """The rich status of an error: ErrorInfo always, the rest as the kind has it."""
    mapping = _mapping_of(error)
    message = cut(error.message)
    info = error_details_pb2.ErrorInfo(reason=mapping.reason, domain=DOMAIN)
    if req_id:
        info.metadata["request_id"] = cut(req_id, 256)
    if isinstance(error, DeadlineExceeded) and error.phase:
        info.metadata["phase"] = cut(error.phase, 32)
    details: list[Any] = [info]  # Any: protobuf messages of several types
    if isinstance(error, InvalidRequest | NotFound) and error.field:
        info.metadata["field"] = cut(error.field, 128)
    if isinstance(error, InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut(error.field, 128), description=message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | Unavailable):
        # A repeat after tokens were sent may send them twice: only the client knows if it minds.
        info.metadata["safe_to_retry"] = "false" if num_tokens_sent else "true"
        info.metadata["num_tokens_sent"] = str(num_tokens_sent)
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        any_message = any_pb2.Any()
        any_message.Pack(detail)
        packed.append(any_message)
    return status_pb2.Status(code=mapping.code.value[0], message=message, details=packed)


async def abort(
    context: grpc.aio.ServicerContext[Any, Any],
    error: PacelineError,
    *,
    req_id: str = "",
    num_tokens_sent: int = 0,
) -> NoReturn:
    """Ends the RPC with the error's status."""
    status = to_status(error, req_id=req_id, num_tokens_sent=num_tokens_sent)
    await context.abort(
        _mapping_of(error).code,
        status.message,
        ((DETAILS_KEY, status.SerializeToString()),),
    )


def answers_rpc(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a servicer's async method: whatever it raises becomes a status.

    A cancellation ends in an explicit abort. Raised out of a grpc.aio handler whose client is
    still there (a server that stops, a task group that fails) it would leave that client hanging.
    """

    @wraps(handler)
    async def unary(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except (Exception, asyncio.CancelledError) as error:
            await _abort_with(context, error, handler.__name__)

    @wraps(handler)
    async def stream(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(handler(self, request, context)) as responses:
                async for response in responses:
                    yield response
        except (Exception, asyncio.CancelledError) as error:
            await _abort_with(context, error, handler.__name__)

    return stream if inspect.isasyncgenfunction(handler) else unary


async def _abort_with(context: Any, error: BaseException, what: str) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):
        log.debug("write failed method=%s: %s", what, error)
        error = asyncio.CancelledError()  # the client is gone, and gRPC is about to tell
    if isinstance(error, asyncio.CancelledError):
        # The client's own cancel or deadline: it is gone, and gRPC refuses the abort.
        with suppress(grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError):
            await abort(context, Cancelled("the call was cancelled"))
        return
    if isinstance(error, PacelineError):
        await abort(context, error)
    log.error("rpc failed method=%s", what, exc_info=error)
    await abort(context, InternalError(f"{what} failed inside the server; its log says why"))


def from_rpc_error(error: grpc.RpcError) -> PacelineError:
    """The error that a server of ours sent, or the closest one for a status that is not ours."""
    code = error.code()
    text = error.details() or code.name
    ours = _rebuild(_details_of(error), text)
    if ours is not None:
        return ours
    closest: type[PacelineError] = _BY_CODE.get(code, InternalError)
    return closest(text)


def from_status(data: bytes) -> PacelineError:
    """The error of a serialized `to_status`."""
    status = status_pb2.Status.FromString(data)
    return _rebuild(status, status.message) or InternalError(status.message)


def is_ours(error: grpc.RpcError) -> bool:
    """Whether a server of ours chose the status; a broken connection's is gRPC's own."""
    return _details_of(error) is not None


def _details_of(error: grpc.RpcError) -> status_pb2.Status | None:
    trailing: Any = error.trailing_metadata() or ()  # Any: typed as one pair by the stubs
    for key, value in trailing:
        if key == DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return None


def _rebuild(status: status_pb2.Status | None, text: str) -> PacelineError | None:
    """None for a status that is not ours."""
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    if info.domain != DOMAIN or info.reason not in _BY_REASON:
        return None
    cls = _BY_REASON[info.reason].error
    if cls is InvalidRequest or cls is NotFound:
        return cls(text, info.metadata.get("field", ""))
    if cls is DeadlineExceeded:
        return DeadlineExceeded(text, info.metadata.get("phase", ""))
    if cls is Overloaded or cls is Unavailable:
        return cls(text, _retry_delay_s(status))
    return cls(text)


def _retry_delay_s(status: status_pb2.Status) -> float:
    for detail in status.details:
        retry = error_details_pb2.RetryInfo()
        if detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            return float(retry.retry_delay.ToNanoseconds()) / 1e9
    return 1.0


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: dict[str, Any]  # Any: JSON


def to_http(error: PacelineError) -> HttpAnswer:
    """The error in OpenAI's shape."""
    mapping = _mapping_of(error)
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    body = {
        "error": {
            "message": cut(error.message),
            "type": mapping.openai_type,
            "param": getattr(error, "field", "") or None,
            "code": reason_of(error),
        }
    }
    return HttpAnswer(mapping.http, headers, body)
