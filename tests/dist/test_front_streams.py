"""A front's one stream to a leader, which all its requests share, through real servers."""

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from paceline.cluster.client import PacelineClient
from paceline.protos.v1 import common_pb2, generation_pb2
from paceline.worker.errors import DeadlineExceeded, InternalError, Unavailable
from tests.dist.conftest import Front
from tests.fake_cluster import FakeLeader, Script, poll


async def answer(
    client: PacelineClient, prompt: str, **sampling: Any
) -> generation_pb2.GenerateComplete:
    return await client.generate_text(prompt, **sampling)


async def test_requests_share_a_stream_and_keep_their_answers_apart(front: Front) -> None:
    front.leader.script.per_step = 3
    async with PacelineClient(front.grpc_address) as client:
        prompts = [f"<{i}>" for i in range(20)]
        answers = await asyncio.gather(*(answer(client, p, max_tokens=9) for p in prompts))
        assert [a.text for a in answers] == [(p * 3)[:9] for p in prompts]
        await answer(client, "later", max_tokens=2)
    assert front.leader.num_streams == 1


async def test_a_refused_request_leaves_its_neighbours_alone(front: Front) -> None:
    script = front.leader.script
    script.gate.clear()
    async with PacelineClient(front.grpc_address) as client:
        good = asyncio.create_task(answer(client, "good", max_tokens=8))
        await poll(lambda: len(front.leader.running) == 1)
        front.leader.script = Script(error_after=0, error=InternalError("of this one"))
        with pytest.raises(InternalError, match="of this one"):
            await answer(client, "bad", max_tokens=8)
        assert not good.done()
        script.gate.set()
        assert (await good).text == "goodgood"
    assert front.leader.num_streams == 1


async def test_a_lost_leader_fails_over_what_had_no_token_and_ends_the_rest(front: Front) -> None:
    lost = FakeLeader("target-lost")
    await lost.start()
    front.controller.leaders.insert(0, lost)
    lost.script.never_ends = True
    async with PacelineClient(front.grpc_address) as client:
        begun = [client.generate("ab", max_tokens=100) for _ in range(3)]
        for stream in begun:
            assert (await anext(stream)).token_ids
        lost.script.gate.clear()
        waiting = [asyncio.create_task(answer(client, "cd", max_tokens=4)) for _ in range(3)]
        await poll(lambda: len(lost.running) == 6)
        front.controller.leaders.pop(0)
        await lost.stop()
        for stream in begun:
            with pytest.raises(Unavailable, match=r"'target-lost'.*was lost after"):
                async for _ in stream:
                    pass
        for complete in await asyncio.gather(*waiting):
            assert (complete.text, complete.receipt.group_id) == ("cdcd", "target-0")
    assert lost.num_streams == front.leader.num_streams == 1


async def test_a_leader_that_is_back_at_its_address_is_streamed_to_anew(front: Front) -> None:
    async with PacelineClient(front.grpc_address) as client:
        assert (await answer(client, "one", max_tokens=3)).text == "one"
        await front.leader.stop()
        await front.leader.start()
        assert (await answer(client, "two", max_tokens=3)).text == "two"
    assert front.leader.num_streams == 2


async def test_a_client_that_does_not_read_holds_up_nobody(front: Front) -> None:
    """Its answer waits in the front, joined; the leader is done with it."""
    front.leader.script.per_step = 500
    num_tokens = 200_000
    core = front.server.core
    core.resolver._model = dataclasses.replace(core.model, max_model_len=num_tokens + 10)
    request = generation_pb2.GenerateRequest(
        tokenized=generation_pb2.TokenizedInput(input_ids=[50, 51]),
        sampling_params=common_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        stream=True,
    )
    async with grpc.aio.insecure_channel(front.grpc_address) as channel:
        slow = type(front.stub)(channel).Generate(request)
        await slow.read()
        await poll(lambda: not front.leader.running, 30.0)
        async with PacelineClient(front.grpc_address) as client:
            assert (await answer(client, "quick", max_tokens=5)).text == "quick"
        num_chunks = 0
        last = None
        while (response := await slow.read()) is not grpc.aio.EOF:
            num_chunks += response.HasField("chunk")
            last = response
    assert last is not None
    assert len(last.complete.output_ids) == num_tokens
    assert num_chunks < num_tokens // 500


async def test_a_request_may_be_cancelled_at_any_moment(front: Front) -> None:
    front.leader.script.never_ends = True

    async def begin_and_cancel(num_turns: int) -> None:
        call = front.stub.Generate(
            generation_pb2.GenerateRequest(
                text="ab",
                stream=True,
                request_id=f"c{num_turns}",
                sampling_params=common_pb2.SamplingParams(max_tokens=100),
            )
        )
        for _ in range(num_turns):
            await asyncio.sleep(0)
        call.cancel()

    await asyncio.gather(*(begin_and_cancel(2 * i) for i in range(60)))
    core = front.server.core
    await poll(lambda: core.req_ids() == ([], []) and not front.leader.running)
    assert front.leader.num_streams <= 1
    front.leader.script.never_ends = False
    async with PacelineClient(front.grpc_address) as client:
        assert (await answer(client, "fine", max_tokens=4)).text == "fine"


async def test_an_abort_that_overtakes_its_start_reaches_no_leader(front: Front) -> None:
    core = front.server.core
    begin = core._leaders.start

    def begin_and_abort(live: Any) -> Any:
        run = begin(live)
        run.abort()
        return run

    core._leaders.start = begin_and_abort  # type: ignore[method-assign]  # to be in between
    async with PacelineClient(front.grpc_address) as client:
        complete = await answer(client, "never", max_tokens=4)
    assert complete.finish_reason == common_pb2.FINISH_REASON_ABORT
    assert not front.leader.requests


async def test_a_leader_that_says_nothing_costs_a_request_its_deadline(front: Front) -> None:
    core = front.server.core
    core.resolver._limits = dataclasses.replace(core.limits, default_deadline_s=0.2)
    front.leader.script.ignores_abort = True
    front.leader.script.gate.clear()
    async with PacelineClient(front.grpc_address) as client:
        with pytest.raises(DeadlineExceeded, match=r"0.2 s") as caught:
            await answer(client, "silent", max_tokens=4, request_id="silent")
        assert caught.value.phase == "prefill"
        await poll(lambda: front.leader.aborts == ["silent"])
        core.resolver._limits = core.limits
        front.leader.script.gate.set()
        assert (await answer(client, "heard", max_tokens=5)).text == "heard"


async def test_an_end_without_a_reason_is_an_error_not_an_answer(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_pb2, "FINISH_REASON_LENGTH", common_pb2.FINISH_REASON_UNSPECIFIED)
    async with PacelineClient(front.grpc_address) as client:
        with pytest.raises(InternalError, match="without a finish reason"):
            await answer(client, "abc", max_tokens=2)
