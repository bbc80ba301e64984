"""The front over a real leader of a tiny model: what the scripted one only claims to do."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from paceline.cluster.client import PacelineClient
from paceline.cluster.group.server import GroupServer
from paceline.cluster.group.step_loop import StepLoop
from paceline.protos.v1 import admin_pb2, common_pb2
from paceline.protos.v1.admin_pb2_grpc import AdminServiceStub
from paceline.worker.config import CacheConfig, WorkerConfig
from paceline.worker.errors import Unavailable
from paceline.worker.models.registry import load_model_config
from paceline.worker.target.build import build_executor
from tests.dist.conftest import Front
from tests.fake_cluster import poll

PROMPT = list(range(20, 60))


@pytest.fixture
async def loop(front: Front, tiny_model: Path) -> AsyncIterator[StepLoop]:
    """The scripted leader's place is taken by a real step loop on a thread of its own."""
    config = WorkerConfig(
        model=load_model_config(tiny_model), cache=CacheConfig(num_pages=64), num_threads=1
    )
    executor = await asyncio.to_thread(build_executor, config)
    loop = StepLoop(
        executor,
        None,
        cache=config.cache,
        scheduler=config.scheduler,
        spec=config.spec,
        max_model_len=config.model.max_model_len,
        eos_token_ids=config.model.eos_token_ids,
        check_invariants=True,
    )

    async def no_draft(address: str, group_id: str, epoch: int) -> None:
        raise AssertionError("nobody attaches a draft here")

    server = GroupServer(loop, group_id="target-0", attach_draft=no_draft, on_change=lambda: None)
    front.leader.address = f"127.0.0.1:{await server.start('127.0.0.1')}"
    thread = threading.Thread(target=loop.run, name="step-loop")
    thread.start()
    yield loop
    await asyncio.to_thread(loop.stop)
    await asyncio.to_thread(thread.join, 10.0)
    await server.stop(0.0)
    executor.shutdown()


def pages_are_back(loop: StepLoop) -> bool:
    held = loop.snapshot()
    assert held.num_orphaned_pages == 0
    return held.num_free_pages + held.num_cached_pages == held.num_pages


async def test_a_stop_string_cuts_the_same_answer_and_frees_its_pages(
    front: Front, loop: StepLoop
) -> None:
    async with PacelineClient(front.grpc_address) as client:
        whole = await client.generate_text(
            input_ids=PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True
        )
        assert len(whole.output_ids) == 40
        stop = whole.text[10:13]
        cut = await client.generate_text(
            input_ids=PROMPT, temperature=0.0, max_tokens=40, ignore_eos=True, stop=stop
        )
    assert cut.matched_stop_str == stop
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert list(cut.output_ids) == list(whole.output_ids)[: len(cut.output_ids)]
    # Its own step numbers and the prefix hit came over although the front ended the run.
    assert cut.receipt.num_steps >= len(cut.output_ids) - 1 > 0
    assert cut.receipt.cached_tokens > 0
    await poll(lambda: pages_are_back(loop))


async def test_both_faces_give_one_answer_for_one_seed(front: Front, loop: StepLoop) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    async with PacelineClient(front.grpc_address) as client:
        over_grpc = await client.generate_text(input_ids=PROMPT, **sampling)
    reply = await front.http.post("/v1/completions", json={"prompt": PROMPT} | sampling)
    assert reply.json()["choices"][0]["text"] == over_grpc.text
    assert reply.json()["usage"]["completion_tokens"] == len(over_grpc.output_ids)


async def test_an_id_can_be_used_again_the_moment_it_was_cancelled(
    front: Front, loop: StepLoop
) -> None:
    async with PacelineClient(front.grpc_address) as client:
        for _ in range(5):
            async for piece in client.generate(
                input_ids=PROMPT, request_id="again", max_tokens=400, ignore_eos=True
            ):
                assert piece.token_ids
                break
            await poll(lambda: front.server.core.req_ids() == ([], []))
        complete = await client.generate_text(
            input_ids=PROMPT, request_id="again", max_tokens=4, ignore_eos=True
        )
    assert complete.finish_reason == common_pb2.FINISH_REASON_LENGTH
    await poll(lambda: pages_are_back(loop))


async def test_a_stream_that_breaks_gives_every_page_back(front: Front, loop: StepLoop) -> None:
    async with PacelineClient(front.grpc_address) as client:
        streams = [
            client.generate(input_ids=PROMPT[i:], max_tokens=400, ignore_eos=True) for i in range(3)
        ]
        for stream in streams:
            assert (await anext(stream)).token_ids
        await front.server.core._leaders.close()
        for stream in streams:
            with pytest.raises(Unavailable, match="again"):
                async for _ in stream:
                    pass
        await poll(lambda: loop.is_idle and pages_are_back(loop))
        complete = await client.generate_text(input_ids=PROMPT, max_tokens=4, ignore_eos=True)
    assert len(complete.output_ids) == 4


async def test_a_deadline_on_a_real_leader_frees_its_pages(front: Front, loop: StepLoop) -> None:
    core = front.server.core
    limits = dataclasses.replace(core.limits, default_deadline_s=0.1)
    core.resolver._limits = limits
    body = {"prompt": PROMPT, "max_tokens": 470, "ignore_eos": True}
    reply = await front.http.post("/v1/completions", json=body)
    assert reply.status_code == 504
    assert "0.1 s" in reply.json()["error"]["message"]
    await poll(lambda: pages_are_back(loop))


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0])
async def test_a_leader_drains_within_a_limit_only(
    front: Front, loop: StepLoop, timeout_s: float
) -> None:
    async with grpc.aio.insecure_channel(front.leader.address) as channel:
        request = admin_pb2.DrainRequest(timeout_s=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError, match="timeout_s") as caught:
            await AdminServiceStub(channel).Drain(request, timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not loop.load().draining
