"""A whole deployment on a real Ray: a target on two ranks, a draft over gRPC, controller, front."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from paceline.cluster.client import PacelineClient
from paceline.cluster.launch import Deployment
from paceline.protos.v1 import common_pb2, generation_pb2
from paceline.protos.v1.generation_pb2_grpc import GenerationServiceStub
from paceline.worker.errors import AlreadyExists, DeadlineExceeded, InvalidRequest
from tests.deployment import Judge, deployed, group_info, local_ray, snapshot
from tests.polling import wait_for

PROMPTS = [[5 + i, 60 + 3 * i, 7, 130 - i, 9 * i + 4] * (1 + i) for i in range(6)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def deployment(
    tiny_model: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with (
        local_ray(tmp_path_factory.mktemp("ray")),
        deployed(
            tiny_model,
            "whole",
            target__tensor_parallel_size=2,
            draft__method="standalone",
            draft__model=str(tiny_draft),
            cache__num_pages=600,
            scheduler__max_num_seqs=16,
        ) as deployment,
    ):
        yield deployment


@pytest.fixture(scope="module")
def judge(tiny_model: Path) -> Judge:
    return Judge(tiny_model)


async def ask(client: PacelineClient, prompt_ids: list[int], **rest: object) -> list[int]:
    sampling = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | rest
    complete = await client.generate_text(input_ids=prompt_ids, **sampling)
    return list(complete.output_ids)


def pages_are_back(deployment: Deployment) -> bool:
    """Whether no leader holds a page for a req; the prefix cache may keep some."""
    target = snapshot(group_info(deployment, "target-0").address)
    draft = snapshot(group_info(deployment, "draft-0").address)
    for held in (target, draft):
        assert held.num_orphaned_pages == 0
    return all(
        not held.running_req_ids
        and not held.waiting_req_ids
        and held.num_free_pages + held.num_cached_pages == held.num_pages
        for held in (target, draft)
    )


async def test_greedy_answers_over_grpc_equal_transformers(
    deployment: Deployment, judge: Judge
) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
    assert answers == [judge.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


async def test_greedy_answers_over_http_equal_transformers(
    deployment: Deployment, judge: Judge
) -> None:
    async with httpx.AsyncClient(base_url=deployment.http_url, trust_env=False) as http:
        body = {
            "prompt": PROMPTS[1],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
        }
        response = await http.post("/v1/completions", json=body)
        text = response.raise_for_status().json()["choices"][0]["text"]
        ids = judge.greedy(PROMPTS[1], NUM_TOKENS)
        expected = await http.post("/detokenize", json={"tokens": ids})
    assert text == expected.raise_for_status().json()["prompt"]


async def test_the_draft_guesses_and_the_receipt_says_so(deployment: Deployment) -> None:
    assert wait_for(lambda: snapshot(group_info(deployment, "target-0").address).draft_attached)
    async with PacelineClient(deployment.grpc_address) as client:
        complete = await client.generate_text(
            input_ids=PROMPTS[2], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
        )
    receipt = complete.receipt
    assert receipt.completion_tokens == NUM_TOKENS
    assert receipt.proposed_tokens > 0
    assert receipt.group_id == "target-0"
    assert receipt.num_steps == NUM_TOKENS - receipt.accepted_tokens


async def test_operators_see_how_the_draft_fares(deployment: Deployment) -> None:
    target = group_info(deployment, "target-0")
    assert wait_for(lambda: snapshot(target.address).draft.is_up)
    async with PacelineClient(deployment.grpc_address) as client:
        await ask(client, PROMPTS[1])
    held = snapshot(target.address)
    assert held.draft.num_rounds > 0
    assert held.draft.rtt_s > 0
    assert held.draft.refusal == ""
    assert wait_for(
        lambda: group_info(deployment, "target-0").draft.num_rounds >= held.draft.num_rounds
    )
    async with httpx.AsyncClient(base_url=deployment.http_url, trust_env=False) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    (up,) = (line for line in lines if line.startswith("paceline_decoupled_peer_up{"))
    assert 'replica="target-0"' in up
    assert up.endswith(" 1.0")


async def test_seeded_sampling_is_the_same_with_and_without_company(
    deployment: Deployment,
) -> None:
    sampling = {"temperature": 0.8, "seed": 7}
    async with PacelineClient(deployment.grpc_address) as client:
        alone = await ask(client, PROMPTS[0], **sampling)
        together = await asyncio.gather(*(ask(client, PROMPTS[0], **sampling) for _ in range(4)))
    assert together == [alone] * 4


async def test_status_shows_groups_pairing_and_fronts(deployment: Deployment) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        info = await client.server_info()
    target, draft = info.groups
    assert (target.group_id, target.role, target.state, target.tp_size) == (
        "target-0", "target", "ready", 2,
    )  # fmt: skip
    assert (draft.group_id, draft.role, draft.state, draft.tp_size) == (
        "draft-0", "draft", "ready", 1,
    )  # fmt: skip
    assert target.draft_group_id == "draft-0"
    assert target.epoch >= 1
    assert info.speculative_method == "standalone"
    assert deployment.pids().keys() == {"controller", "target-0", "draft-0", "front-0"}
    assert [len(pids) for pids in deployment.pids().values()] == [1, 2, 1, 1]


async def test_cancelled_streams_give_every_page_back(deployment: Deployment) -> None:
    """64 streams, a third of them cancelled at a random moment."""
    rng = random.Random(20)
    before = snapshot(group_info(deployment, "target-0").address)

    async def stream(client: PacelineClient, number: int) -> None:
        tokens_until_cancel = rng.randrange(1, 12) if number % 3 == 0 else NUM_TOKENS + 1
        num_tokens = 0
        pieces = client.generate(
            input_ids=PROMPTS[number % len(PROMPTS)],
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        async for piece in pieces:
            num_tokens += len(piece.token_ids)
            if num_tokens >= tokens_until_cancel:
                break
        await pieces.aclose()  # type: ignore[attr-defined]  # an async generator

    async with PacelineClient(deployment.grpc_address) as client:
        await asyncio.gather(*(stream(client, i) for i in range(64)))
    wait_for(lambda: pages_are_back(deployment))
    after = snapshot(group_info(deployment, "target-0").address)
    assert after.num_pages == before.num_pages
    assert after.num_free_pages + after.num_cached_pages == after.num_pages


async def test_deadline_ends_a_stream_and_gives_its_pages_back(deployment: Deployment) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        with pytest.raises(DeadlineExceeded):
            await ask(client, PROMPTS[0], max_tokens=480, timeout_s=0.3)
    wait_for(lambda: pages_are_back(deployment))


async def test_vanished_clients_give_their_pages_back(deployment: Deployment) -> None:
    """One connection of each kind is closed without a word in the middle of an answer."""
    async with grpc.aio.insecure_channel(deployment.grpc_address) as channel:
        request = generation_pb2.GenerateRequest(
            text="hello",
            sampling_params=common_pb2.SamplingParams(
                temperature=0, max_tokens=400, ignore_eos=True
            ),
            stream=True,
        )
        await anext(aiter(GenerationServiceStub(channel).Generate(request, timeout=30)))
    async with (
        httpx.AsyncClient(base_url=deployment.http_url, trust_env=False) as http,
        http.stream(
            "POST",
            "/v1/completions",
            json={
                "prompt": PROMPTS[3],
                "temperature": 0,
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": True,
            },
        ) as response,
    ):
        assert response.status_code == 200
        await anext(response.aiter_lines())
        assert snapshot(group_info(deployment, "target-0").address).running_req_ids
    wait_for(lambda: pages_are_back(deployment))


async def test_abort_by_id_ends_a_running_request(deployment: Deployment) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        pieces = client.generate(
            input_ids=PROMPTS[0],
            temperature=0.0,
            max_tokens=480,
            ignore_eos=True,
            request_id="to-abort",
        )
        await anext(pieces)
        assert await client.abort("to-abort")
        *_, last = [piece async for piece in pieces]
        assert last.complete is not None
        assert last.complete.finish_reason == common_pb2.FINISH_REASON_ABORT
        assert not await client.abort("to-abort")
    wait_for(lambda: pages_are_back(deployment))


async def test_repeat_of_a_running_id_is_refused_and_harms_nothing(
    deployment: Deployment, judge: Judge
) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        first = client.generate(
            input_ids=PROMPTS[1],
            temperature=0.0,
            max_tokens=120,
            ignore_eos=True,
            request_id="twice",
        )
        begun = await anext(first)
        with pytest.raises(AlreadyExists):
            await ask(client, PROMPTS[1], request_id="twice")
        ids = [*begun.token_ids]
        async for piece in first:
            ids += piece.token_ids
    assert ids == judge.greedy(PROMPTS[1], 120)


async def test_refusal_of_a_leader_reaches_the_client_with_its_field(
    deployment: Deployment,
) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await ask(client, [1] * 600)
    assert "600" in str(caught.value)
    assert caught.value.field


async def test_ranks_see_no_gpu_and_have_their_threads(deployment: Deployment) -> None:
    pids = deployment.pids()
    for pid in (*pids["target-0"], *pids["draft-0"]):
        environ = psutil.Process(pid).environ()
        assert environ["CUDA_VISIBLE_DEVICES"] == ""
        assert environ["OMP_NUM_THREADS"] == "1"


async def test_whole_answer_comes_without_stream(deployment: Deployment) -> None:
    async with PacelineClient(deployment.grpc_address) as client:
        request = generation_pb2.GenerateRequest(
            text="hello", sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=5)
        )
        responses = [response async for response in client.stub.Generate(request, timeout=30)]
    assert [response.WhichOneof("response") for response in responses] == ["complete"]
