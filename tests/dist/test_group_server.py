"""A leader's gRPC face over a scripted step loop: what a front is told of a req, in which order."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import grpc
import pytest

from paceline.cluster.group.req_state import NewReq, ReqEvent
from paceline.cluster.group.server import GroupServer
from paceline.protos.v1 import common_pb2, group_pb2
from paceline.protos.v1.group_pb2_grpc import GroupServiceStub
from paceline.worker.errors import InternalError
from paceline.worker.step import ReqId

if TYPE_CHECKING:
    from paceline.cluster.group.step_loop import StepLoop


class BurstLoop:
    """Says all it has to say of a req in one moment."""

    def __init__(self, *events: ReqEvent) -> None:
        self._events = events
        self.aborted: list[ReqId] = []

    def submit(self, req: NewReq, sink: Callable[[ReqEvent], None]) -> None:
        for event in self._events:
            sink(event)

    def abort(self, req_id: ReqId) -> bool:
        self.aborted.append(req_id)
        return True


@pytest.mark.parametrize("last_ids", [(), (3, 4)])
async def test_tokens_reach_the_front_before_the_error_behind_them(
    last_ids: tuple[int, ...],
) -> None:
    req_id = ReqId("r")
    loop = BurstLoop(
        ReqEvent(req_id, (1,)),
        ReqEvent(req_id, (2,)),
        ReqEvent(req_id, last_ids, error=InternalError("the logits overflowed")),
    )

    async def no_draft(address: str, group_id: str, epoch: int) -> None:
        raise AssertionError("nobody attaches a draft here")

    server = GroupServer(
        cast("StepLoop", loop), group_id="target-0", attach_draft=no_draft, on_change=lambda: None
    )
    port = await server.start("127.0.0.1")
    received: list[int] = []

    async def run() -> None:
        async for message in GroupServiceStub(channel).Run(request, timeout=10.0):
            received.extend(message.token_ids)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = group_pb2.RunRequest(
            req_id=req_id,
            prompt_ids=[5],
            sampling_params=common_pb2.SamplingParams(seed=1, max_tokens=9),
        )
        with pytest.raises(grpc.aio.AioRpcError, match="overflowed") as caught:
            await run()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert received == [1, 2, *last_ids]
    assert loop.aborted == []
    await server.stop(0.0)
