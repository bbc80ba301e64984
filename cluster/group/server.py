"""A target leader's gRPC face: GroupService for fronts, AdminService for operators, health.

It translates and hands over to the step loop; it computes nothing. front_stream.py has the reqs of
one front.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.cluster.front.channels import server_options
from paceline.cluster.front.errors import answers_rpc
from paceline.cluster.group.front_stream import FrontStream
from paceline.cluster.wire import draft_health_to_pb
from paceline.protos.v1 import admin_pb2, admin_pb2_grpc, group_pb2, group_pb2_grpc
from paceline.worker.errors import InvalidRequest, Unavailable
from paceline.worker.step import ReqId

if TYPE_CHECKING:
    from paceline.cluster.group.step_loop import StepLoop

log = logging.getLogger(__name__)

SERVICE_NAME = "paceline.v1.GroupService"

# (draft leader's address or "", its group, epoch) -> once the step loop has been told
AttachDraft = Callable[[str, str, int], Awaitable[None]]
Context = aio.ServicerContext[Any, Any]  # Any: one alias for the messages of all methods


class GroupServer(group_pb2_grpc.GroupServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Serves one step loop.

    Args:
        on_change: called when the load may have changed, so that the controller hears at once.
    """

    def __init__(
        self,
        loop: "StepLoop",
        *,
        group_id: str,
        attach_draft: AttachDraft,
        on_change: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._group_id = group_id
        self._attach_draft = attach_draft
        self._on_change = on_change
        self._health = health.aio.HealthServicer()
        self._server: aio.Server | None = None
        self._streams: set[FrontStream] = set()
        self._is_stopping = False

    async def start(self, host: str, port: int = 0) -> int:
        """Listens; returns the port. Raises: Unavailable: the port cannot be had."""
        server = aio.server(options=server_options())
        group_pb2_grpc.add_GroupServiceServicer_to_server(self, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            bound_port = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen at {host}:{port}: {error}") from error
        await server.start()
        self._server = server
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return bound_port

    async def stop(self, grace_s: float) -> None:
        """The streams of fronts end with their last reqs, or after `grace_s`."""
        if self._server is not None:
            await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            self._is_stopping = True
            for stream in self._streams:
                stream.close_when_idle()
            await self._server.stop(grace_s)

    # ---- GroupService

    @answers_rpc
    async def Run(  # noqa: N802 - the .proto's name
        self, request_iterator: AsyncIterator[group_pb2.RunRequest], context: Context
    ) -> None:
        stream = FrontStream(self._loop, group_id=self._group_id, on_change=self._on_change)
        self._streams.add(stream)
        if self._is_stopping:  # the call came in before gRPC was told to take no more
            stream.close_when_idle()
        try:
            async with aclosing(stream.responses(request_iterator)) as responses:
                async for response in responses:
                    await context.write(response)
        finally:
            self._streams.discard(stream)

    @answers_rpc
    async def AbortReq(  # noqa: N802 - the .proto's name
        self, request: group_pb2.AbortReqRequest, context: Context
    ) -> group_pb2.AbortReqResponse:
        return group_pb2.AbortReqResponse(found=self._loop.abort(ReqId(request.req_id)))

    # ---- AdminService

    @answers_rpc
    async def Drain(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        if not 0 <= request.timeout_s < float("inf"):
            raise InvalidRequest(
                f"timeout_s is {request.timeout_s:g}; use 0 or more seconds", "timeout_s"
            )
        return admin_pb2.DrainResponse(num_aborted=await self.drain(request.timeout_s))

    @answers_rpc
    async def Snapshot(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.SnapshotRequest, context: Context
    ) -> admin_pb2.SnapshotResponse:
        held = self._loop.snapshot()
        return admin_pb2.SnapshotResponse(
            num_pages=held.num_pages,
            num_free_pages=held.num_free_pages,
            num_cached_pages=held.num_cached_pages,
            num_orphaned_pages=held.num_orphaned_pages,
            running_req_ids=held.running_req_ids,
            waiting_req_ids=held.waiting_req_ids,
            step_id=held.step_id,
            epoch=held.epoch,
            draft_attached=held.draft_attached,
            draft=draft_health_to_pb(held.draft),
        )

    @answers_rpc
    async def AttachDraft(  # noqa: N802 - the .proto's name
        self, request: admin_pb2.AttachDraftRequest, context: Context
    ) -> admin_pb2.AttachDraftResponse:
        await self._attach_draft(request.address, request.draft_group_id, request.epoch)
        return admin_pb2.AttachDraftResponse()

    async def drain(self, timeout_s: float) -> int:
        """Readiness off, then waits for the running reqs; how many were aborted at the limit."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        num_aborted = await asyncio.to_thread(self._loop.drain, timeout_s)
        self._on_change()
        return num_aborted

    async def set_not_serving(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_health(self, status: int) -> None:
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)
