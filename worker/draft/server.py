"""DraftServer: a draft group's gRPC face: Speculate streams, health, and a snapshot for operators.

It checks, translates and hands over to the device thread; it never computes. One stream is one
target; what a target's reqs hold is freed when its stream ends.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from concurrent.futures import Executor

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.protos.v1 import admin_pb2, admin_pb2_grpc
from paceline.protos.v1 import speculation_pb2 as pb
from paceline.protos.v1 import speculation_pb2_grpc as pb_grpc
from paceline.worker.draft.device_loop import ClosedReqs, DeviceLoop
from paceline.worker.draft.proposer import Proposer, ProposerSnapshot, TreeShape
from paceline.worker.errors import Unavailable
from paceline.worker.link import wire
from paceline.worker.link.base import Commit, Proposals
from paceline.worker.link.channel_options import SERVER_OPTIONS
from paceline.worker.step import ReqId

log = logging.getLogger(__name__)

SERVICE_NAME = "paceline.v1.SpeculationService"


class DraftServer(pb_grpc.SpeculationServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Serves one proposer, which it owns from `start` on, to any number of targets."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        vocab_hash: bytes,
        vocab_size: int,
        group_id: str,
        max_streams: int = 64,
        attach_timeout_s: float = 10.0,
        device_thread: Executor | None = None,
    ) -> None:
        """`device_thread` as for DeviceLoop."""
        self._vocab_hash = vocab_hash
        self._vocab_size = vocab_size
        self._group_id = group_id
        self._max_model_len = proposer.max_model_len
        self._max_streams = max_streams
        self._attach_timeout_s = attach_timeout_s
        self._device = DeviceLoop(
            proposer, on_failure=self._on_device_failure, device_thread=device_thread
        )
        self._health = health.aio.HealthServicer()
        self._streams: dict[str, _Stream] = {}  # by target group
        self._numbers = itertools.count()
        self._failure = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: aio.Server | None = None
        self._health_task: asyncio.Task[None] | None = None

    async def start(
        self, host: str, port: int, *, credentials: grpc.ServerCredentials | None = None
    ) -> int:
        """Listens at host:port, 0 for any port. Returns the port.

        Raises: Unavailable: the port cannot be had.
        """
        assert self._server is None, "started twice"
        self._loop = asyncio.get_running_loop()
        server = aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_SpeculationServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = f"{host}:{port}"
        try:
            bound_port = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen at {address}: {error}; choose another port"
            ) from error
        self._device.start()
        self._server = server
        await server.start()
        await self._set_health(is_serving=True)
        log.info("draft serving group=%s address=%s:%d", self._group_id, host, bound_port)
        return bound_port

    async def stop(self, grace_s: float = 2.0) -> None:
        """Refuses new streams, ends the open ones, and stops the device thread."""
        if self._server is None:
            return
        await self._set_health(is_serving=False)
        for stream in list(self._streams.values()):
            stream.end("the draft is shutting down")
        await self._server.stop(grace_s)
        if not await asyncio.to_thread(self._device.stop, max(grace_s, 5.0)):
            log.warning("draft device thread did not stop in time group=%s", self._group_id)

    async def wait_for_failure(self) -> None:
        """Returns when the device is lost; the server refuses streams from then on."""
        await self._failure.wait()

    def snapshot(self) -> ProposerSnapshot:
        """What is held, as of the last round; never waits for the device."""
        return self._device.snapshot()

    # ---- SpeculationService

    async def Speculate(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.SpeculateRequest],
        context: aio.ServicerContext[pb.SpeculateRequest, pb.SpeculateResponse],
    ) -> AsyncIterator[pb.SpeculateResponse]:
        attach = await self._read_attach(request_iterator, context)
        stream = await self._open_stream(attach, context)
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            yield pb.SpeculateResponse(
                attached=pb.Attached(
                    epoch=attach.epoch,
                    draft_group_id=self._group_id,
                    max_model_len=self._max_model_len,
                )
            )
            while (proposals := await stream.next_answer()) is not None:
                yield pb.SpeculateResponse(proposals=wire.proposals_to_proto(proposals))
            if stream.end_reason:
                await context.abort(grpc.StatusCode.UNAVAILABLE, stream.end_reason)
        finally:
            reader.cancel()
            self._close_stream(stream)

    async def _read_attach(
        self,
        requests: AsyncIterator[pb.SpeculateRequest],
        context: aio.ServicerContext[pb.SpeculateRequest, pb.SpeculateResponse],
    ) -> pb.Attach:
        try:
            async with asyncio.timeout(self._attach_timeout_s):
                first = await anext(requests, None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("message") != "attach":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first message of a stream must be an attach, "
                f"within {self._attach_timeout_s:g} s",
            )
        assert first is not None
        return first.attach

    async def _open_stream(
        self,
        attach: pb.Attach,
        context: aio.ServicerContext[pb.SpeculateRequest, pb.SpeculateResponse],
    ) -> "_Stream":
        """Checks an attach and takes the place of an earlier stream of the same target."""
        if refusal := self._refuse(attach):
            code, text = refusal
            log.warning("attach refused target=%r: %s", attach.target_group_id, text)
            await context.abort(code, text)
        assert self._loop is not None
        earlier = self._streams.get(attach.target_group_id)
        if earlier is not None:
            earlier.end(f"target {attach.target_group_id!r} attached again")
        stream = _Stream(
            # The device knows each stream by its own name: what an earlier one left is not ours.
            device_name=f"{attach.target_group_id}#{next(self._numbers)}",
            attach=attach,
            limits=wire.RowLimits(
                self._vocab_size,
                attach.max_num_reqs,
                attach.max_model_len,
                attach.num_draft_tokens,
            ),
            loop=self._loop,
        )
        self._streams[attach.target_group_id] = stream
        shape = TreeShape(attach.num_steps, attach.topk)
        self._device.open(stream.device_name, shape, stream.deliver, stream.make_room)
        log.info("target attached group=%s epoch=%d", attach.target_group_id, attach.epoch)
        return stream

    def _refuse(self, attach: pb.Attach) -> tuple[grpc.StatusCode, str] | None:
        """Why an attach cannot be; each with what to do about it."""
        code = grpc.StatusCode
        if attach.version != wire.PROTOCOL_VERSION:
            return code.FAILED_PRECONDITION, (
                f"target speaks version {attach.version} of the protocol, this draft speaks "
                f"{wire.PROTOCOL_VERSION}; run the same release on both sides"
            )
        if attach.vocab_size != self._vocab_size or attach.vocab_hash != self._vocab_hash:
            return code.FAILED_PRECONDITION, (
                f"vocabulary of the target ({attach.vocab_size} tokens, hash "
                f"{attach.vocab_hash.hex()[:12]}) is not the draft's ({self._vocab_size} tokens, "
                f"hash {self._vocab_hash.hex()[:12]}); use a draft with the target's tokenizer"
            )
        for name in ("target_group_id", "max_num_reqs", "max_model_len", "num_steps", "topk"):
            if not getattr(attach, name):
                return code.INVALID_ARGUMENT, f"attach has no {name}; it must be set"
        if attach.num_draft_tokens < 2:
            return code.INVALID_ARGUMENT, (
                f"attach has num_draft_tokens {attach.num_draft_tokens}; it counts the root and "
                "must be at least 2"
            )
        if self._failure.is_set():
            return code.UNAVAILABLE, "the draft's device is lost; it must be restarted"
        if len(self._streams) >= self._max_streams and attach.target_group_id not in self._streams:
            return code.RESOURCE_EXHAUSTED, (
                f"{self._max_streams} targets are attached, which is the limit; "
                "use another draft group"
            )
        return None

    async def _read(self, stream: "_Stream", requests: AsyncIterator[pb.SpeculateRequest]) -> None:
        """Hands a stream's messages to the device. A row that is wrong is left out, and so is a
        message out of place: the stream lives."""
        try:
            async for request in requests:
                kind = request.WhichOneof("message")
                if kind == "commit" and request.commit.epoch == stream.attach.epoch:
                    commit, bad = wire.commit_from_proto(request.commit, stream.limits)
                    if bad:
                        stream.num_bad_rows += len(bad)
                        log.debug("rows left out target=%s num=%d", stream.device_name, len(bad))
                    await self._submit(stream, commit)
                elif kind == "close":
                    await self._submit(stream, ClosedReqs(tuple(map(ReqId, request.close.req_ids))))
        except aio.AioRpcError:
            log.debug("stream broke target=%s", stream.device_name)
        finally:
            stream.end("")

    async def _submit(self, stream: "_Stream", item: Commit | ClosedReqs) -> None:
        """Waits while the device is behind, so that flow control reaches the target."""
        while not self._device.submit(stream.device_name, item):
            await stream.has_room.wait()
            stream.has_room.clear()

    def _close_stream(self, stream: "_Stream") -> None:
        self._device.end(stream.device_name)
        target = stream.attach.target_group_id
        if self._streams.get(target) is stream:
            del self._streams[target]
        log.info(
            "target detached group=%s epoch=%d bad_rows=%d",
            target, stream.attach.epoch, stream.num_bad_rows,
        )  # fmt: skip

    # ---- AdminService

    async def Snapshot(  # noqa: N802
        self,
        request: admin_pb2.SnapshotRequest,
        context: aio.ServicerContext[admin_pb2.SnapshotRequest, admin_pb2.SnapshotResponse],
    ) -> admin_pb2.SnapshotResponse:
        held = self.snapshot()
        return admin_pb2.SnapshotResponse(
            num_pages=held.num_pages,
            num_free_pages=held.num_free_pages,
            num_cached_pages=held.num_cached_pages,
            num_orphaned_pages=held.num_orphaned_pages,
            running_req_ids=held.req_ids,
            step_id=held.step_id,
            epoch=max((s.attach.epoch for s in self._streams.values()), default=0),
            draft_attached=bool(self._streams),
        )

    async def AttachDraft(  # noqa: N802
        self,
        request: admin_pb2.AttachDraftRequest,
        context: aio.ServicerContext[admin_pb2.AttachDraftRequest, admin_pb2.AttachDraftResponse],
    ) -> admin_pb2.AttachDraftResponse:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED, "a draft has no draft of its own; call a target's leader"
        )

    async def Drain(  # noqa: N802
        self,
        request: admin_pb2.DrainRequest,
        context: aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainResponse],
    ) -> admin_pb2.DrainResponse:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            "a draft may stop at any time; drain its targets",
        )

    # ---- health

    async def _set_health(self, *, is_serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if is_serving else response.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    def _on_device_failure(self, error: BaseException) -> None:
        """On the device thread: ends every stream, so that no target waits for an answer."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._fail, str(error))

    def _fail(self, reason: str) -> None:
        self._failure.set()
        for stream in list(self._streams.values()):
            stream.end(f"the draft's device is lost: {reason}")
        self._health_task = asyncio.create_task(self._set_health(is_serving=False))


class _Stream:
    """One attached target. The latest answer waits to be written; an older one is worth nothing."""

    def __init__(
        self,
        *,
        device_name: str,
        attach: pb.Attach,
        limits: wire.RowLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.device_name = device_name
        self.attach = attach
        self.limits = limits
        self.end_reason = ""
        self.num_bad_rows = 0
        self._loop = loop
        self._answer: Proposals | None = None
        self._has_ended = False
        self._changed = asyncio.Event()
        self.has_room = asyncio.Event()

    def make_room(self) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(self.has_room.set)

    def deliver(self, proposals: Proposals) -> None:
        """Any thread."""
        self._loop.call_soon_threadsafe(self._set_answer, proposals)

    def end(self, reason: str) -> None:
        """Ends the stream; with a reason its target is told that the draft is unavailable."""
        if not self._has_ended:
            self._has_ended = True
            self.end_reason = reason
            self._changed.set()

    async def next_answer(self) -> Proposals | None:
        """None when the stream is to end."""
        await self._changed.wait()
        self._changed.clear()
        answer, self._answer = self._answer, None
        return None if self._has_ended else answer

    def _set_answer(self, proposals: Proposals) -> None:
        self._answer = proposals
        self._changed.set()
