"""The controller's queue over gRPC: who may take a request out of it, and what its callers hear."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from paceline.cluster.controller.core import ControllerCore
from paceline.cluster.controller.events import (
    Action,
    Event,
    GroupReady,
    GroupReported,
    GroupStarting,
    Tick,
)
from paceline.cluster.controller.state import ControllerState
from paceline.cluster.scheduling.dispatch import GroupLoad
from paceline.protos.v1 import controller_pb2
from paceline.protos.v1.controller_pb2_grpc import (
    ControllerServiceStub,
    add_ControllerServiceServicer_to_server,
)
from tests.fake_cluster import poll, serve

if TYPE_CHECKING:
    from paceline.protos.v1.controller_pb2_grpc import ControllerServiceAsyncStub


class Queue:
    """A core without a group, so that what is submitted waits."""

    def __init__(self, core: ControllerCore, stub: "ControllerServiceAsyncStub") -> None:
        self.core = core
        self._stub = stub

    def submit(
        self, req_id: str, *, deadline_unix_s: float | None = None
    ) -> "asyncio.Future[controller_pb2.SubmitResponse]":
        request = controller_pb2.SubmitRequest(
            req_id=req_id, num_prompt_tokens=4, max_tokens=4, deadline_unix_s=deadline_unix_s
        )

        async def call() -> controller_pb2.SubmitResponse:
            return await self._stub.Submit(request, timeout=10.0)

        return asyncio.ensure_future(call())

    async def release(self, req_id: str, *, abort: bool = False) -> bool:
        request = controller_pb2.ReleaseRequest(req_id=req_id, abort=abort)
        return (await self._stub.Release(request, timeout=10.0)).found

    async def bring_up_group(self) -> None:
        self.core.handle(GroupStarting("t0", "target", 1))
        self.core.handle(GroupReady("t0", "t0:1"))
        self.core.handle(GroupReported(GroupLoad("t0", 16, 100, 100, 0, 0, 4, address="t0:1")))


@asynccontextmanager
async def run_queue() -> AsyncIterator[Queue]:
    core = ControllerCore(ControllerState(), on_attach=lambda action: None, fronts=list)
    server, address = await serve(add_ControllerServiceServicer_to_server, core)
    async with grpc.aio.insecure_channel(address) as channel:
        yield Queue(core, ControllerServiceStub(channel))
    await server.stop(None)


async def test_a_late_release_leaves_the_next_request_of_its_id_in_the_queue() -> None:
    """A client that lost one front asks another; the first is slow to say that it is done."""
    async with run_queue() as queue:
        again = queue.submit("a")
        await poll(lambda: queue.core.state.num_queued_reqs == 1)
        assert not await queue.release("a")
        await queue.bring_up_group()
        assert (await again).group_id == "t0"


async def test_an_abort_answers_all_who_wait_for_the_request() -> None:
    async with run_queue() as queue:
        waiting = [queue.submit("a"), queue.submit("a")]
        await poll(lambda: queue.core.state.num_queued_reqs == 1)
        await poll(lambda: len(queue.core._waiters["a"]) == 2)
        assert await queue.release("a", abort=True)
        for call in waiting:
            with pytest.raises(grpc.aio.AioRpcError, match="aborted") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert queue.core.state.num_queued_reqs == 0
        assert not await queue.release("a", abort=True)


async def test_a_tick_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_queue() as queue:
        state = queue.core.state
        handle = state.handle

        def fail_once(event: Event, now_s: float) -> list[Action]:
            if isinstance(event, Tick):
                monkeypatch.setattr(state, "handle", handle)
                raise RuntimeError("a defect")
            return handle(event, now_s)

        monkeypatch.setattr(state, "handle", fail_once)
        ticking = asyncio.create_task(queue.core.tick())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await queue.submit("a", deadline_unix_s=time.time() + 0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "a defect" in caplog.text
        ticking.cancel()


async def test_a_release_gives_the_place_back() -> None:
    async with run_queue() as queue:
        await queue.bring_up_group()
        await queue.submit("a")
        assert queue.core.state.num_sent_reqs == 1
        assert not await queue.release("a")
        assert queue.core.state.num_sent_reqs == 0
