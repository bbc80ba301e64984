"""A controller and a target leader without a model, as real gRPC servers.

The leader answers with a scripted stream of token ids, so a test of the front knows each token.
Both record what they are told.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.cluster.front.channels import server_options
from paceline.cluster.front.errors import answers_rpc, to_status
from paceline.protos.v1 import common_pb2, controller_pb2, generation_pb2, group_pb2
from paceline.protos.v1.controller_pb2_grpc import (
    ControllerServiceServicer,
    add_ControllerServiceServicer_to_server,
)
from paceline.protos.v1.group_pb2_grpc import (
    GroupServiceServicer,
    add_GroupServiceServicer_to_server,
)
from paceline.worker.errors import AlreadyExists, DeadlineExceeded, PacelineError, Unavailable


async def serve(
    add: Callable[[Any, grpc.aio.Server], None], servicer: object, port: int = 0
) -> tuple[Any, str]:
    """(server, address) of one servicer on 127.0.0.1, on a free port unless one is given."""
    server = grpc.aio.server(options=server_options())
    add(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, f"127.0.0.1:{port}"


@dataclass
class Script:
    """What a leader does with a request.

    Without `token_ids` it echoes the prompt, over and over. It emits `per_step` tokens a message,
    and before each message it waits for `gate`.
    """

    token_ids: list[int] | None = None
    per_step: int = 1
    error_after: int | None = None  # tokens before `error`, or before the connection breaks
    error: PacelineError | None = None
    never_ends: bool = False
    ignores_abort: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()


_BROKEN = group_pb2.RunResponse()  # instead of which the connection breaks


class FakeLeader(GroupServiceServicer):
    def __init__(self, group_id: str = "target-0") -> None:
        self.group_id = group_id
        self.script = Script()
        self.draft: common_pb2.DraftHealth | None = None
        self.num_streams = 0
        self.requests: list[group_pb2.StartReq] = []
        self.running: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []  # with their stream
        self.aborts: list[str] = []
        self.address = ""
        self._server: Any = None

    async def start(self) -> str:
        """At its last address, if it had one."""
        port = int(self.address.rpartition(":")[2] or 0)
        self._server, self.address = await serve(add_GroupServiceServicer_to_server, self, port)
        return self.address

    async def stop(self) -> None:
        await self._server.stop(None)

    @answers_rpc
    async def Run(  # noqa: N802 - the .proto's name
        self, request_iterator: AsyncIterator[group_pb2.RunRequest], context: Any
    ) -> AsyncIterator[group_pb2.RunResponse]:
        self.num_streams += 1
        news: asyncio.Queue[group_pb2.RunResponse | None] = asyncio.Queue(maxsize=4)
        runs: dict[int, asyncio.Task[None]] = {}
        req_ids: dict[int, str] = {}

        async def take_orders() -> None:
            async for request in request_iterator:
                for number in request.aborts:
                    self._abort(req_ids[number])
                for start in request.starts:
                    req_ids[start.number] = start.req_id
                    runs[start.number] = asyncio.create_task(self._run(start, news))
            await news.put(None)

        orders = asyncio.create_task(take_orders())
        try:
            while (response := await news.get()) is not None:
                if response is _BROKEN:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                yield response
        finally:
            tasks = [orders, *runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, start: group_pb2.StartReq, news: "asyncio.Queue[group_pb2.RunResponse | None]"
    ) -> None:
        async def put(ids: list[int], end: group_pb2.ReqEnd | None = None) -> None:
            response = group_pb2.RunResponse(ends=[] if end is None else [end])
            if ids:
                response.numbers.append(start.number)
                response.num_tokens.append(len(ids))
                response.token_ids.extend(ids)
            await news.put(response)

        async def put_error(error: PacelineError) -> None:
            status = to_status(error).SerializeToString()
            await put([], group_pb2.ReqEnd(number=start.number, error=status))

        if start.req_id in self.running:
            await put_error(AlreadyExists(f"request '{start.req_id}' is running"))
            return
        self.requests.append(start)
        is_aborted = self.running[start.req_id] = asyncio.Event()
        script = self.script
        num_sent = 0
        try:
            for ids, is_last in self._steps(script, start):
                await self._wait_for_turn(script, is_aborted)
                if is_aborted.is_set() and not script.ignores_abort:
                    await put([], self._end(start, num_sent, common_pb2.FINISH_REASON_ABORT))
                    return
                if script.error_after is not None and num_sent >= script.error_after:
                    if script.error is None:
                        await news.put(_BROKEN)
                    else:
                        await put_error(script.error)
                    return
                num_sent += len(ids)
                reason = common_pb2.FINISH_REASON_LENGTH
                await put(ids, self._end(start, num_sent, reason) if is_last else None)
        except asyncio.CancelledError:
            self.cancelled.append(start.req_id)
            raise
        finally:
            del self.running[start.req_id]

    @answers_rpc
    async def AbortReq(  # noqa: N802 - the .proto's name
        self, request: group_pb2.AbortReqRequest, context: Any
    ) -> group_pb2.AbortReqResponse:
        return group_pb2.AbortReqResponse(found=self._abort(request.req_id))

    def _abort(self, req_id: str) -> bool:
        self.aborts.append(req_id)
        found = self.running.get(req_id)
        if found is not None:
            found.set()
        return found is not None

    def _steps(
        self, script: Script, request: group_pb2.StartReq
    ) -> "list[tuple[list[int], bool]] | Any":
        source = script.token_ids or list(request.prompt_ids)
        limit = request.sampling_params.max_tokens
        num_tokens = 0
        while script.never_ends or num_tokens < limit:
            ids = []
            while len(ids) < script.per_step and (script.never_ends or num_tokens < limit):
                ids.append(source[num_tokens % len(source)])
                num_tokens += 1
            yield ids, not script.never_ends and num_tokens >= limit

    async def _wait_for_turn(self, script: Script, is_aborted: asyncio.Event) -> None:
        """Until the gate is open or somebody aborts."""
        waits = [asyncio.ensure_future(script.gate.wait())]
        if not script.ignores_abort:
            waits.append(asyncio.ensure_future(is_aborted.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _end(self, start: group_pb2.StartReq, num_sent: int, reason: Any) -> group_pb2.ReqEnd:
        receipt = common_pb2.Receipt(
            prompt_tokens=len(start.prompt_ids),
            completion_tokens=num_sent,
            cached_tokens=3,
            proposed_tokens=8,
            accepted_tokens=5,
            num_steps=max(1, num_sent - 5),
            seed=start.sampling_params.seed,
            group_id=self.group_id,
        )
        return group_pb2.ReqEnd(number=start.number, finish_reason=reason, receipt=receipt)


class FakeController(ControllerServiceServicer):
    """Gives every request to the first of its leaders that is left."""

    def __init__(self, *leaders: FakeLeader) -> None:
        self.leaders = list(leaders)
        self.submitted: list[controller_pb2.SubmitRequest] = []
        self.released: list[str] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: PacelineError | None = None
        self.drops_released_leader = False
        self.address = ""
        self._server: Any = None

    async def start(self) -> str:
        self._server, self.address = await serve(add_ControllerServiceServicer_to_server, self)
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def resolve(self) -> str:
        if self._server is None:
            raise Unavailable("no controller is running")
        return self.address

    @answers_rpc
    async def Submit(  # noqa: N802 - the .proto's name
        self, request: controller_pb2.SubmitRequest, context: Any
    ) -> controller_pb2.SubmitResponse:
        self.submitted.append(request)
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.req_id)
            raise
        leader = self.leaders[0]
        return controller_pb2.SubmitResponse(
            group_id=leader.group_id, address=leader.address, queue_s=0.25
        )

    @answers_rpc
    async def Release(  # noqa: N802 - the .proto's name
        self, request: controller_pb2.ReleaseRequest, context: Any
    ) -> controller_pb2.ReleaseResponse:
        self.released.append(request.req_id)
        if self.drops_released_leader:
            self.drops_released_leader = False
            del self.leaders[0]
        return controller_pb2.ReleaseResponse()

    @answers_rpc
    async def GetStatus(  # noqa: N802 - the .proto's name
        self, request: controller_pb2.GetStatusRequest, context: Any
    ) -> controller_pb2.GetStatusResponse:
        groups = [
            generation_pb2.GroupInfo(
                group_id=leader.group_id,
                role="target",
                state="ready",
                tp_size=1,
                address=leader.address,
                num_pages=100,
                num_free_pages=75,
                num_running_reqs=len(leader.running),
                epoch=1 if leader.draft else 0,
                draft_group_id="draft-0" if leader.draft else "",
                draft=leader.draft,
            )
            for leader in self.leaders
        ]
        return controller_pb2.GetStatusResponse(uptime_s=12.0, groups=groups, num_queued_reqs=2)


DEADLINE_ERROR = DeadlineExceeded("the leader's own words", "prefill")


async def poll(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits until the condition holds. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
