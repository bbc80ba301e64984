"""A small async client of GenerationService.

async with PacelineClient("127.0.0.1:50051") as client:
    async for piece in client.generate(messages=[{"role": "user", "content": "Hello"}]):
        print(piece.text, end="", flush=True)
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from paceline.cluster.front.channels import client_options
from paceline.cluster.front.errors import from_rpc_error, is_ours
from paceline.protos.v1 import common_pb2, generation_pb2
from paceline.protos.v1.generation_pb2_grpc import GenerationServiceStub
from paceline.worker.errors import InternalError, InvalidRequest, PacelineError, Unavailable


@dataclass(frozen=True, slots=True)
class Piece:
    """New text and tokens; the last piece of an answer has `complete`, and no new text."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    complete: generation_pb2.GenerateComplete | None = None


class PacelineClient:
    """Raises errors of `paceline.worker.errors`, as the server raised them."""

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: str = "",
        ca_certs: bytes | None = None,
        use_tls: bool = False,
    ) -> None:
        """`ca_certs`: PEM of who signed the server's certificate; implies TLS."""
        if use_tls or ca_certs is not None:
            credentials = grpc.ssl_channel_credentials(root_certificates=ca_certs)
            self._channel = grpc.aio.secure_channel(address, credentials, client_options())
        else:
            self._channel = grpc.aio.insecure_channel(address, client_options())
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.stub = GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        input_ids: Sequence[int] | None = None,
        request_id: str = "",
        model: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **sampling: Any,  # Any: the fields of SamplingParams, of several types
    ) -> AsyncIterator[Piece]:
        """Streams an answer. Exactly one of prompt, messages, input_ids.

        Keyword arguments beyond these are fields of `SamplingParams`: temperature, max_tokens,
        stop, seed and so on.
        """
        request = generation_pb2.GenerateRequest(
            request_id=request_id,
            sampling_params=_sampling_params(sampling),
            stream=True,
            priority=priority,
            model=model,
        )
        if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
            raise InvalidRequest("give exactly one of prompt, messages and input_ids", "prompt")
        if prompt is not None:
            request.text = prompt
        elif messages is not None:
            request.chat.messages.extend(
                generation_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages
            )
            request.chat.SetInParent()
        else:
            request.tokenized.input_ids.extend(input_ids or ())
            request.tokenized.SetInParent()
        call = self.stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                if response.HasField("complete"):
                    yield Piece(response.request_id, "", (), response.complete)
                else:
                    chunk = response.chunk
                    yield Piece(response.request_id, chunk.text, tuple(chunk.token_ids))
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    async def generate_text(
        self,
        prompt: str | None = None,
        **rest: Any,  # Any: as `generate` takes them
    ) -> generation_pb2.GenerateComplete:
        """The whole answer at once."""
        async for piece in self.generate(prompt, **rest):
            if piece.complete is not None:
                return piece.complete
        raise InternalError("the stream ended without an answer")

    async def abort(self, request_id: str) -> bool:
        request = generation_pb2.AbortRequest(request_id=request_id)
        reply: generation_pb2.AbortResponse = await self._unary(self.stub.Abort, request)
        return reply.found

    async def model_info(self) -> generation_pb2.GetModelInfoResponse:
        request = generation_pb2.GetModelInfoRequest()
        info: generation_pb2.GetModelInfoResponse = await self._unary(
            self.stub.GetModelInfo, request
        )
        return info

    async def server_info(self) -> generation_pb2.GetServerInfoResponse:
        request = generation_pb2.GetServerInfoRequest()
        info: generation_pb2.GetServerInfoResponse = await self._unary(
            self.stub.GetServerInfo, request
        )
        return info

    def _error(self, error: grpc.aio.AioRpcError) -> PacelineError:
        ours = from_rpc_error(error)
        if isinstance(ours, Unavailable) and not is_ours(error):
            return Unavailable(
                f"no server answers at {self._address} ({ours}); start one with 'paceline serve' "
                "or name another address"
            )
        return ours

    async def _unary(self, method: Any, request: Any) -> Any:  # Any: each RPC has its own types
        try:
            return await method(request, timeout=10.0, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None


def _sampling_params(sampling: Mapping[str, Any]) -> common_pb2.SamplingParams:  # Any: as above
    given = {name: value for name, value in sampling.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        return common_pb2.SamplingParams(**given)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"sampling parameters cannot be sent: {error}") from None
