"""ControllerCore: ControllerState with its clock, its waiters and its wire.

It serves ControllerService: it turns calls into events, lets callers wait for what the state
decides, and passes actions on. Decisions are the state's; processes are the supervisors'.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from grpc import aio

from paceline.cluster.controller.events import (
    Action,
    Assign,
    AttachDraft,
    Event,
    GroupReported,
    GroupSilent,
    Refuse,
    ReqReleased,
    ReqSubmitted,
    Tick,
)
from paceline.cluster.controller.state import ControllerState, Group
from paceline.cluster.front.errors import Cancelled, answers_rpc
from paceline.cluster.scheduling.dispatch import WaitingReq
from paceline.cluster.wire import draft_health_to_pb, load_from_pb
from paceline.protos.v1 import controller_pb2, controller_pb2_grpc, generation_pb2
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.errors import InvalidRequest
from paceline.worker.step import ReqId

log = logging.getLogger(__name__)

_TICK_S = 0.1
Context = aio.ServicerContext[Any, Any]  # Any: one alias for the messages of all methods


class ControllerCore(controller_pb2_grpc.ControllerServiceServicer):
    """
    Args:
        on_attach: called with every pairing decided; must not block.
        fronts: (gRPC, HTTP) addresses of the fronts that are up.
    """

    def __init__(
        self,
        state: ControllerState,
        *,
        on_attach: Callable[[AttachDraft], None],
        fronts: Callable[[], list[tuple[str, str]]],
        clock: Clock | None = None,
    ) -> None:
        self._state = state
        self._on_attach = on_attach
        self._fronts = fronts
        self._clock = clock or SystemClock()
        self._started_s = self._clock.monotonic()
        # Each caller waits on a future of its own: a repeat of a req_id joins the first.
        self._waiters: dict[ReqId, set[asyncio.Future[Assign]]] = {}
        self._is_draining = False

    @property
    def state(self) -> ControllerState:
        return self._state

    def handle(self, event: Event) -> None:
        """Applies one event and does what follows from it."""
        for action in self._state.handle(event, self._clock.monotonic()):
            self._do(action)

    async def tick(self) -> None:
        """Lets deadlines pass, until cancelled."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self.handle(Tick())
            except Exception:  # whoever waits does so for the next deadline too
                log.exception("tick failed")

    def begin_drain(self) -> None:
        """Reports are answered with the order to drain from now on."""
        self._is_draining = True

    # ---- ControllerService

    @answers_rpc
    async def Submit(  # noqa: N802 - the .proto's name
        self, request: controller_pb2.SubmitRequest, context: Context
    ) -> controller_pb2.SubmitResponse:
        if not request.req_id:
            raise InvalidRequest("req_id is empty; it must be unique", "req_id")
        req = self._waiting_req(request)
        future: asyncio.Future[Assign] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(req.req_id, set()).add(future)
        try:
            self.handle(ReqSubmitted(req))
            assigned = await future
        finally:
            self._leave(req.req_id, future)
        return controller_pb2.SubmitResponse(
            group_id=assigned.group_id, address=assigned.address, queue_s=assigned.queue_s
        )

    @answers_rpc
    async def Release(  # noqa: N802 - the .proto's name
        self, request: controller_pb2.ReleaseRequest, context: Context
    ) -> controller_pb2.ReleaseResponse:
        req_id = ReqId(request.req_id)
        is_waiting = req_id in self._waiters
        if is_waiting and not request.abort:
            return controller_pb2.ReleaseResponse()  # who waits holds no place yet
        self.handle(ReqReleased(req_id))
        self._settle(req_id, Cancelled(f"request '{req_id}' was aborted in the queue"))
        return controller_pb2.ReleaseResponse(found=is_waiting)

    @answers_rpc
    async def Report(  # noqa: N802 - the .proto's name
        self,
        request_iterator: AsyncIterator[controller_pb2.ReportRequest],
        context: Context,
    ) -> AsyncIterator[controller_pb2.ReportResponse]:
        reporter = ("", "")
        try:
            async for request in request_iterator:
                reporter = (request.group_id, request.address)
                self.handle(GroupReported(load_from_pb(request)))
                yield controller_pb2.ReportResponse(drain=self._is_draining)
        finally:
            if reporter[0]:
                self.handle(GroupSilent(*reporter))

    @answers_rpc
    async def GetStatus(  # noqa: N802 - the .proto's name
        self, request: controller_pb2.GetStatusRequest, context: Context
    ) -> controller_pb2.GetStatusResponse:
        fronts = self._fronts()
        return controller_pb2.GetStatusResponse(
            uptime_s=self._clock.monotonic() - self._started_s,
            num_queued_reqs=self._state.num_queued_reqs,
            groups=[_group_info(group) for group in self._state.groups],
            front_grpc_addresses=[grpc_address for grpc_address, _ in fronts],
            front_http_addresses=[http_address for _, http_address in fronts],
        )

    # ---- actions

    def _do(self, action: Action) -> None:
        match action:
            case Assign():
                if not self._settle(action.req_id, action):
                    # Its callers left in this very moment; the place is free again.
                    self.handle(ReqReleased(action.req_id))
            case Refuse():
                self._settle(action.req_id, action.error)
            case AttachDraft():
                self._on_attach(action)

    def _settle(self, req_id: ReqId, result: Assign | Exception) -> bool:
        """Answers all callers that wait for a req; False when there is none."""
        waiting = [f for f in self._waiters.pop(req_id, set()) if not f.done()]
        for future in waiting:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        return bool(waiting)

    def _leave(self, req_id: ReqId, future: "asyncio.Future[Assign]") -> None:
        """The last caller to leave takes its req out of the queue."""
        if future.done() and not future.cancelled():
            return
        waiting = self._waiters.get(req_id, set())
        waiting.discard(future)
        if not waiting:
            self._waiters.pop(req_id, None)
            self.handle(ReqReleased(req_id))

    def _waiting_req(self, request: controller_pb2.SubmitRequest) -> WaitingReq:
        now_s = self._clock.monotonic()
        deadline_s = None
        if request.HasField("deadline_unix_s"):
            deadline_s = now_s + request.deadline_unix_s - self._clock.unix_s()
        return WaitingReq(
            req_id=ReqId(request.req_id),
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            deadline_s=deadline_s,
            prefix_hash=request.prefix_hash,
            arrival_s=now_s,
        )


def _group_info(group: Group) -> generation_pb2.GroupInfo:
    info = generation_pb2.GroupInfo(
        group_id=group.group_id,
        role=group.role,
        state=group.status,
        tp_size=group.tp_size,
        address=group.address,
        num_pages=group.num_pages,
        draft_group_id=group.draft_group_id,
        epoch=group.epoch,
        last_error=group.last_error,
        draft=draft_health_to_pb(group.load.draft) if group.load is not None else None,
    )
    if group.load is not None:
        info.num_free_pages = group.load.num_free_pages
        info.num_running_reqs = group.load.num_running_reqs
        info.num_waiting_reqs = group.load.num_waiting_reqs
    return info
