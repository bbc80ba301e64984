"""The front's gRPC face: GenerationService, AdminService, health, reflection.

Translates messages and delegates; every rule on a request is in requests.py, every error's status
in errors.py.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]  # ships no stubs
    reflection,
)

from paceline.cluster.front.answer import Chunk, Complete
from paceline.cluster.front.auth import ApiKeys
from paceline.cluster.front.errors import Unsupported, abort, answers_rpc
from paceline.cluster.front.requests import (
    GenerationInput,
    resolve_request_id,
)
from paceline.cluster.front.sampling import SamplingInput
from paceline.cluster.front.service import GenerationCore
from paceline.cluster.version import version
from paceline.cluster.wire import finish_reason_to_pb
from paceline.protos.v1 import admin_pb2, common_pb2, generation_pb2
from paceline.protos.v1.admin_pb2_grpc import (
    AdminServiceServicer,
    add_AdminServiceServicer_to_server,
)
from paceline.protos.v1.generation_pb2_grpc import (
    GenerationServiceServicer,
    add_GenerationServiceServicer_to_server,
)
from paceline.worker.errors import InvalidRequest, PacelineError

GENERATION_SERVICE = "paceline.v1.GenerationService"
ADMIN_SERVICE = "paceline.v1.AdminService"
_OPEN_SERVICES = ("grpc.health.", "grpc.reflection.")
_OPTIONAL_SAMPLING: tuple[Any, ...] = (  # Any: HasField takes literals only
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
# Any: grpc.aio's context is generic over messages that no code here names.
Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(GenerationServiceServicer):
    def __init__(self, core: GenerationCore) -> None:
        self._core = core

    @answers_rpc
    async def Generate(  # noqa: N802 - the .proto's name
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Writes the responses itself: a generator here would cost each token a detour."""
        req_id = ""
        num_tokens_sent = 0
        try:
            req_id = resolve_request_id(request.request_id)
            # One for all chunks: a write serializes it at once.
            part = generation_pb2.GenerateResponse(request_id=req_id)
            asked = _generation_input(request, req_id, _time_left_s(context))
            async with aclosing(self._core.generate(asked)) as events:
                async for event in events:
                    if isinstance(event, Complete):
                        await context.write(_complete_response(req_id, event))
                    elif request.stream:
                        _set_chunk(part.chunk, event)
                        await context.write(part)
                        num_tokens_sent += len(event.token_ids)
        except PacelineError as error:
            await abort(context, error, req_id=req_id, num_tokens_sent=num_tokens_sent)

    @answers_rpc
    async def Abort(  # noqa: N802 - the .proto's name
        self, request: generation_pb2.AbortRequest, context: Context
    ) -> generation_pb2.AbortResponse:
        if not request.request_id:
            raise InvalidRequest("request_id is empty; name the request to end", "request_id")
        return generation_pb2.AbortResponse(found=await self._core.abort(request.request_id))

    @answers_rpc
    async def GetModelInfo(  # noqa: N802 - the .proto's name
        self, request: generation_pb2.GetModelInfoRequest, context: Context
    ) -> generation_pb2.GetModelInfoResponse:
        model = self._core.model
        return generation_pb2.GetModelInfoResponse(
            served_model_names=model.names,
            model_path=model.path,
            architecture=model.architecture,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            dtype=model.dtype,
            has_chat_template=self._core.codec.has_chat_template,
        )

    @answers_rpc
    async def GetServerInfo(  # noqa: N802 - the .proto's name
        self, request: generation_pb2.GetServerInfoRequest, context: Context
    ) -> generation_pb2.GetServerInfoResponse:
        return await server_info(self._core)

    @answers_rpc
    async def Tokenize(  # noqa: N802 - the .proto's name
        self, request: generation_pb2.TokenizeRequest, context: Context
    ) -> generation_pb2.TokenizeResponse:
        add_special_tokens = not request.HasField("add_special_tokens") or (
            request.add_special_tokens
        )
        if request.WhichOneof("input") == "chat":
            ids = await self._core.tokenize_chat(
                _messages(request.chat), add_generation_prompt=_adds_prompt(request.chat)
            )
        else:
            ids = await self._core.tokenize(request.text, add_special_tokens=add_special_tokens)
        return generation_pb2.TokenizeResponse(
            token_ids=ids, max_model_len=self._core.model.max_model_len
        )

    @answers_rpc
    async def Detokenize(  # noqa: N802 - the .proto's name
        self, request: generation_pb2.DetokenizeRequest, context: Context
    ) -> generation_pb2.DetokenizeResponse:
        text = self._core.detokenize(
            list(request.token_ids), skip_special_tokens=request.skip_special_tokens
        )
        return generation_pb2.DetokenizeResponse(text=text)


class AdminServicer(AdminServiceServicer):
    def __init__(self, core: GenerationCore, on_drain: Callable[[], Awaitable[None]]) -> None:
        """`on_drain`: told first, so that readiness is off before anything is refused."""
        self._core = core
        self._on_drain = on_drain

    @answers_rpc
    async def Drain(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        if not 0 <= request.timeout_s < float("inf"):
            raise InvalidRequest(
                f"timeout_s is {request.timeout_s:g}; use 0 or more seconds", "timeout_s"
            )
        await self._on_drain()
        return admin_pb2.DrainResponse(num_aborted=await self._core.drain(request.timeout_s))

    @answers_rpc
    async def Snapshot(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.SnapshotRequest, context: Context
    ) -> admin_pb2.SnapshotResponse:
        running, waiting = self._core.req_ids()
        return admin_pb2.SnapshotResponse(running_req_ids=running, waiting_req_ids=waiting)

    @answers_rpc
    async def AttachDraft(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.AttachDraftRequest, context: Context
    ) -> admin_pb2.AttachDraftResponse:
        raise Unsupported("a front has no draft; call AttachDraft on a target group's leader")


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known key; health and reflection stay open."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],  # Any: grpc's untyped handlers
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method.lstrip("/")
        if method.startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        try:
            self._keys.check(
                str(metadata.get("authorization", "")), is_admin=method.startswith(ADMIN_SERVICE)
            )
        except PacelineError as error:
            return _refusal(error)
        return await continuation(handler_call_details)


class HealthBoard:
    """grpc.health.v1: "" says the process lives, the service's name that it can serve."""

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self.is_ready = False

    async def start(self) -> None:
        await self.servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(is_ready=False)

    async def set_ready(self, *, is_ready: bool) -> None:
        self.is_ready = is_ready
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if is_ready
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        await self.servicer.set(GENERATION_SERVICE, status)


def add_services(
    server: grpc.aio.Server,
    core: GenerationCore,
    board: HealthBoard,
    on_drain: Callable[[], Awaitable[None]],
) -> None:
    add_GenerationServiceServicer_to_server(GenerationServicer(core), server)
    add_AdminServiceServicer_to_server(AdminServicer(core, on_drain), server)
    health_pb2_grpc.add_HealthServicer_to_server(board.servicer, server)
    names = (GENERATION_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


async def server_info(core: GenerationCore) -> generation_pb2.GetServerInfoResponse:
    """Raises: Unavailable: the controller does not answer."""
    status = await core.status()
    return generation_pb2.GetServerInfoResponse(
        version=version(),
        uptime_s=status.uptime_s,
        groups=status.groups,
        num_queued_reqs=status.num_queued_reqs,
        speculative_method=core.speculative_method,
        max_message_bytes=core.limits.max_message_bytes,
        simulated_accept_length=core.simulated_accept_length,
    )


def _refusal(error: PacelineError) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(request: Any, context: Context) -> NoReturn:
        await abort(context, error)

    return grpc.unary_unary_rpc_method_handler(refuse)


def _time_left_s(context: Context) -> float | None:
    """None for a client without a deadline, which gRPC shows as one in the far future."""
    left_s = context.time_remaining()
    return None if left_s is None or left_s > 10 * 365 * 86_400 else left_s


def _generation_input(
    request: generation_pb2.GenerateRequest, req_id: str, time_left_s: float | None
) -> GenerationInput:
    kind = request.WhichOneof("input")
    return GenerationInput(
        text=request.text if kind == "text" else None,
        input_ids=request.tokenized.input_ids if kind == "tokenized" else None,
        messages=_messages(request.chat) if kind == "chat" else None,
        add_generation_prompt=_adds_prompt(request.chat),
        sampling=_sampling_input(request.sampling_params),
        request_id=req_id,
        model=request.model,
        priority=request.priority,
        time_limit_s=time_left_s,
    )


def _messages(chat: generation_pb2.ChatInput) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _adds_prompt(chat: generation_pb2.ChatInput) -> bool:
    return not chat.HasField("add_generation_prompt") or chat.add_generation_prompt


def _sampling_input(params: common_pb2.SamplingParams) -> SamplingInput:
    present: dict[str, Any] = {  # Any: scalars of several types
        name: getattr(params, name) for name in _OPTIONAL_SAMPLING if params.HasField(name)
    }
    return SamplingInput(
        **present,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        logit_bias=dict(params.logit_bias),
    )


def _set_chunk(message: generation_pb2.GenerateChunk, chunk: Chunk) -> None:
    message.token_ids[:] = chunk.token_ids
    message.text = chunk.text


def _complete_response(req_id: str, complete: Complete) -> generation_pb2.GenerateResponse:
    message = generation_pb2.GenerateComplete(
        output_ids=complete.output_ids,
        text=complete.text,
        finish_reason=finish_reason_to_pb(complete.finish_reason),
        receipt=complete.receipt,
    )
    if complete.matched_token_id is not None:
        message.matched_token_id = complete.matched_token_id
    if complete.matched_stop is not None:
        message.matched_stop_str = complete.matched_stop
    return generation_pb2.GenerateResponse(request_id=req_id, complete=message)
