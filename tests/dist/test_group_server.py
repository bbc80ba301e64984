"""A leader's gRPC face over a scripted step loop: what a front is told of its reqs, and when."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, cast

import grpc
import pytest

from paceline.cluster.front.errors import from_status
from paceline.cluster.group.front_stream import FrontStream
from paceline.cluster.group.inbox import Inbox, Sink, Wake
from paceline.cluster.group.req_state import NewReq, ReqEvent, ReqState
from paceline.cluster.group.server import GroupServer
from paceline.cluster.scheduling.admission import AdmissionLimits
from paceline.protos.v1 import common_pb2, group_pb2
from paceline.protos.v1.group_pb2_grpc import GroupServiceStub
from paceline.worker.clock import SystemClock
from paceline.worker.errors import (
    AlreadyExists,
    InternalError,
    InvalidRequest,
    Overloaded,
    PacelineError,
)
from paceline.worker.step import FinishReason, ReqId
from tests.fake_cluster import poll

if TYPE_CHECKING:
    from paceline.cluster.group.step_loop import StepLoop


class ScriptedLoop:
    """Takes what it is not told to refuse, and says of it what a test says."""

    def __init__(self) -> None:
        self._inbox = Inbox(AdmissionLimits(), SystemClock())
        self.num_submitted = 0
        self.aborted: list[str] = []
        self.refusals: dict[str, Exception] = {}
        self.before_sink: Callable[[], object] = lambda: None

    def submit(self, req: NewReq, sink: Sink) -> None:
        if req.req_id in self.refusals:
            raise self.refusals[req.req_id]

        def wrapped(event: ReqEvent) -> Wake | None:
            self.before_sink()
            return sink(event)

        state = ReqState(req, 0.0, 0.0)
        self._inbox.submit(state, wrapped, num_running=0, max_num_running=99, num_waiting_tokens=0)
        self.num_submitted += 1

    def abort(self, req_id: ReqId) -> bool:
        self.aborted.append(req_id)
        return self._inbox.abort(req_id)

    def step(self, *events: ReqEvent) -> None:
        self._inbox.send(events)


@asynccontextmanager
async def serving(loop: ScriptedLoop) -> AsyncIterator[tuple[GroupServer, GroupServiceStub]]:
    async def no_draft(address: str, group_id: str, epoch: int) -> None:
        raise AssertionError("nobody attaches a draft here")

    server = GroupServer(
        cast("StepLoop", loop), group_id="target-0", attach_draft=no_draft, on_change=lambda: None
    )
    port = await server.start("127.0.0.1")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, GroupServiceStub(channel)
    finally:
        await server.stop(0.0)


def said(
    req_id: str,
    *new_ids: int,
    reason: FinishReason | None = None,
    error: PacelineError | None = None,
) -> ReqEvent:
    return ReqEvent(ReqId(req_id), new_ids, reason, error=error)


def start(number: int, req_id: str) -> group_pb2.StartReq:
    params = common_pb2.SamplingParams(seed=1, max_tokens=9)
    return group_pb2.StartReq(number=number, req_id=req_id, prompt_ids=[5], sampling_params=params)


def starts(*req_ids: str) -> group_pb2.RunRequest:
    """Numbered from 1."""
    return group_pb2.RunRequest(starts=[start(i, r) for i, r in enumerate(req_ids, 1)])


def tokens_of(response: group_pb2.RunResponse) -> dict[int, list[int]]:
    ids = iter(response.token_ids)
    counts = zip(response.numbers, response.num_tokens, strict=True)
    found = {number: [next(ids) for _ in range(count)] for number, count in counts}
    assert next(ids, None) is None
    return found


@pytest.mark.parametrize("last_ids", [(), (3, 4)])
async def test_tokens_reach_the_front_with_the_error_behind_them(last_ids: tuple[int, ...]) -> None:
    loop = ScriptedLoop()
    async with serving(loop) as (_, stub):
        call = stub.Run()
        await call.write(starts("r"))
        await poll(lambda: loop.num_submitted == 1)
        loop.step(said("r", 1))
        loop.step(said("r", 2))
        loop.step(said("r", *last_ids, error=InternalError("the logits overflowed")))
        response = await call.read()
        assert tokens_of(response) == {1: [1, 2, *last_ids]}
        error = from_status(response.ends[0].error)
        assert isinstance(error, InternalError)
        assert "overflowed" in str(error)
        call.cancel()
    assert not loop.aborted


async def test_what_a_step_brings_all_reqs_is_one_message() -> None:
    loop = ScriptedLoop()
    async with serving(loop) as (_, stub):
        call = stub.Run()
        await call.write(starts("a", "b", "c"))
        await poll(lambda: loop.num_submitted == 3)

        await asyncio.to_thread(  # a thread of its own, as the step thread is
            loop.step,
            said("a", 1, 2),
            said("b", 3),
            said("c", 4, 5, 6, reason=FinishReason.LENGTH),
        )
        response = await call.read()
        assert tokens_of(response) == {1: [1, 2], 2: [3], 3: [4, 5, 6]}
        assert [(e.number, e.finish_reason) for e in response.ends] == [
            (3, common_pb2.FINISH_REASON_LENGTH)
        ]
        call.cancel()
        await poll(lambda: loop.aborted == ["a", "b"])


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (AlreadyExists("it runs"), AlreadyExists),
        (Overloaded("9 wait", 2.5), Overloaded),
        (InvalidRequest("no tokens", "prompt_ids"), InvalidRequest),
        (ZeroDivisionError("ours"), InternalError),
    ],
)
async def test_a_refused_req_does_not_end_the_others(
    refusal: Exception, kind: type[PacelineError], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="paceline.cluster.group.front_stream")
    loop = ScriptedLoop()
    loop.refusals["bad"] = refusal
    async with serving(loop) as (_, stub):
        call = stub.Run()
        await call.write(starts("good", "bad", ""))
        ends = []
        while len(ends) < 2:
            ends += (await call.read()).ends
        errors = {end.number: from_status(end.error) for end in ends}
        assert type(errors[2]) is kind
        assert isinstance(errors[3], InvalidRequest)  # without an id
        if isinstance(refusal, Overloaded | InvalidRequest):
            assert errors[2].args == refusal.args
        loop.step(said("good", 7))
        assert tokens_of(await call.read()) == {1: [7]}
        call.cancel()


async def test_an_order_to_abort_names_one_req_of_its_own_stream() -> None:
    loop = ScriptedLoop()
    async with serving(loop) as (_, stub):
        mine, theirs = stub.Run(), stub.Run()
        await theirs.write(starts("theirs"))
        await mine.write(starts("a", "b"))
        await poll(lambda: loop.num_submitted == 3)
        await mine.write(group_pb2.RunRequest(aborts=[2, 77]))
        await poll(lambda: loop.aborted == ["b"])
        loop.step(said("b", reason=FinishReason.ABORT))
        response = await mine.read()
        assert [end.finish_reason for end in response.ends] == [common_pb2.FINISH_REASON_ABORT]
        # An abort that crosses the end is for nobody, whoever has the id by now.
        await mine.write(group_pb2.RunRequest(aborts=[2]))
        mine.cancel()
        await poll(lambda: loop.aborted == ["b", "a"])
        theirs.cancel()
        await poll(lambda: loop.aborted == ["b", "a", "theirs"])


async def test_a_front_that_is_gone_has_all_its_reqs_aborted() -> None:
    loop = ScriptedLoop()
    async with serving(loop) as (_, stub):
        calls = [stub.Run() for _ in range(40)]
        for i, call in enumerate(calls):
            await call.write(starts(f"{i}a", f"{i}b"))
        await poll(lambda: loop.num_submitted == 80)
        for i, call in enumerate(calls):
            if i % 2:
                loop.step(said(f"{i}a", 1))  # a write may be on its way
            if i % 4 < 2:
                call.cancel()
            else:
                await call.done_writing()
        await poll(lambda: len(loop.aborted) == 80)
        assert set(loop.aborted) == {f"{i}{which}" for i in range(40) for which in "ab"}


async def test_a_stream_that_is_cancelled_twice_still_aborts_its_reqs() -> None:
    """gRPC does, when a front ends its side and goes away at once."""
    loop = ScriptedLoop()

    async def orders() -> AsyncIterator[group_pb2.RunRequest]:
        yield starts("r")
        await asyncio.Event().wait()

    stream = FrontStream(cast("StepLoop", loop), group_id="target-0", on_change=lambda: None)
    serving = asyncio.create_task(anext(stream.responses(orders())))
    await poll(lambda: loop.num_submitted == 1)
    serving.cancel()
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait((serving,))
    assert loop.aborted == ["r"]


async def test_an_id_that_begins_anew_is_not_ended_by_its_last_run() -> None:
    """The group forgets a req before it tells of its end: a new one may come in between."""
    loop = ScriptedLoop()
    is_forgotten, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_forgotten.set()
        goes_on.wait(10.0)

    loop.before_sink = wait
    async with serving(loop) as (_, stub):
        call = stub.Run()
        await call.write(starts("again"))
        await poll(lambda: loop.num_submitted == 1)
        telling = asyncio.create_task(
            asyncio.to_thread(loop.step, said("again", 1, reason=FinishReason.ABORT))
        )
        await poll(is_forgotten.is_set)
        await call.write(group_pb2.RunRequest(starts=[start(2, "again")]))
        await poll(lambda: loop.num_submitted == 2)
        goes_on.set()
        await telling
        response = await call.read()
        assert (tokens_of(response), response.ends[0].number) == ({1: [1]}, 1)
        loop.step(said("again", 2, reason=FinishReason.LENGTH))
        response = await call.read()
        assert (tokens_of(response), response.ends[0].number) == ({2: [2]}, 2)
        call.cancel()


async def test_a_number_that_is_taken_ends_the_stream_that_is_no_fronts() -> None:
    loop = ScriptedLoop()
    async with serving(loop) as (_, stub):
        call = stub.Run()
        await call.write(group_pb2.RunRequest(starts=[start(1, "a"), start(1, "b")]))
        with pytest.raises(grpc.aio.AioRpcError, match="number 1") as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert loop.aborted == ["a"]


async def test_a_front_that_reads_late_finds_each_reqs_tokens_joined() -> None:
    """Nothing waits but tokens: a megabyte of them, more than gRPC takes in without a reader."""
    loop = ScriptedLoop()
    burst = tuple(range(1000, 1256))
    async with serving(loop) as (_, stub):
        call = stub.Run()
        await call.write(starts("a", "b"))
        await poll(lambda: loop.num_submitted == 2)
        for i in range(2000):
            loop.step(said("a", *burst))
            loop.step(said("b", i))
            if i % 20 == 0:
                await asyncio.sleep(0)
        loop.step(said("a", reason=FinishReason.LENGTH))
        loop.step(said("b", reason=FinishReason.LENGTH))
        received: dict[int, list[int]] = {1: [], 2: []}
        num_messages = num_ends = 0
        while num_ends < 2:
            response = await call.read()
            num_messages += 1
            num_ends += len(response.ends)
            for number, ids in tokens_of(response).items():
                received[number] += ids
        assert received == {1: list(burst) * 2000, 2: list(range(2000))}
        assert num_messages < 1000
        call.cancel()


async def test_a_front_that_does_not_read_its_refusals_is_not_listened_to() -> None:
    loop = ScriptedLoop()
    loop.refusals["bad"] = Overloaded("9 wait")
    num_taken = 0

    async def orders() -> AsyncIterator[group_pb2.RunRequest]:
        nonlocal num_taken
        for number in range(1, 100):
            num_taken += 1
            yield group_pb2.RunRequest(starts=[start(number, "bad")])

    stream = FrontStream(cast("StepLoop", loop), group_id="target-0", on_change=lambda: None)
    async with aclosing(stream.responses(orders())) as responses:
        async for response in responses:
            assert [end.number for end in response.ends] == [num_taken]
            for _ in range(20):  # it has every chance to go on
                await asyncio.sleep(0)
    assert num_taken == 99


async def test_a_leader_that_stops_ends_streams_once_they_are_idle() -> None:
    loop = ScriptedLoop()
    async with serving(loop) as (server, stub):
        idle, busy = stub.Run(), stub.Run()
        await idle.write(starts("done"))
        await busy.write(starts("r"))
        await poll(lambda: loop.num_submitted == 2)
        loop.step(said("done", reason=FinishReason.LENGTH))
        assert len((await idle.read()).ends) == 1
        async with asyncio.timeout(10.0):
            stopping = asyncio.create_task(server.stop(60.0))
            assert await idle.read() is grpc.aio.EOF
            assert not stopping.done()
            loop.step(said("r", 1, reason=FinishReason.LENGTH))
            assert tokens_of(await busy.read()) == {1: [1]}
            assert await busy.read() is grpc.aio.EOF
            await stopping
    assert not loop.aborted
