"""Deployments of other shapes answer alike: several groups, a tensor-parallel draft, no draft
group at all; and a full queue refuses at once."""

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.client import PacelineClient
from paceline.cluster.launch import Deployment
from paceline.worker.errors import Overloaded
from tests.deployment import Judge, deployed, group_info, local_ray, snapshot
from tests.polling import wait_for

PROMPTS = [[3 + i, 99, 150 - 7 * i, 20, 4 * i + 1] for i in range(6)]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with local_ray(tmp_path_factory.mktemp("ray")):
        yield


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    judge = Judge(tiny_model)
    return [judge.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS]


async def ask_all(deployment: Deployment) -> list[Any]:
    async with PacelineClient(deployment.grpc_address) as client:
        return await asyncio.gather(
            *(
                client.generate_text(
                    input_ids=prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
                )
                for prompt in PROMPTS
            )
        )


async def test_two_groups_share_the_requests_and_each_has_a_draft_of_two_ranks(
    ray_cluster: None, tiny_model: Path, tiny_draft: Path, expected: list[list[int]]
) -> None:
    with deployed(
        tiny_model,
        "two-groups",
        target__groups=2,
        draft__method="standalone",
        draft__model=str(tiny_draft),
        draft__groups=2,
        draft__tensor_parallel_size=2,
        draft__topk=2,
        draft__num_steps=3,
        draft__fallback="ngram",
        cache__num_pages=200,
        scheduler__max_num_seqs=3,
    ) as deployment:
        pairs = {group_info(deployment, f"target-{i}").draft_group_id for i in range(2)}
        assert pairs == {"draft-0", "draft-1"}
        answers = await ask_all(deployment)
        for draft_id in ("draft-0", "draft-1"):
            wait_for(functools.partial(is_idle, deployment, draft_id))
    assert [list(answer.output_ids) for answer in answers] == expected
    assert {answer.receipt.group_id for answer in answers} == {"target-0", "target-1"}
    assert all(answer.receipt.proposed_tokens for answer in answers)


@pytest.mark.parametrize("method", ["ngram", "standalone"])
async def test_draft_without_a_group_of_its_own_changes_no_token(
    ray_cluster: None, tiny_model: Path, tiny_draft: Path, expected: list[list[int]], method: str
) -> None:
    settings: dict[str, Any] = {"draft__method": method}
    if method == "standalone":
        settings |= {"draft__model": str(tiny_draft), "draft__placement": "colocated"}
    with deployed(
        tiny_model, f"colocated-{method}", cache__num_pages=200, **settings
    ) as deployment:
        assert deployment.pids().keys() == {"controller", "target-0", "front-0"}
        answers = await ask_all(deployment)
    assert [list(answer.output_ids) for answer in answers] == expected
    assert any(answer.receipt.proposed_tokens for answer in answers)


@pytest.mark.parametrize("method", ["ngram", "standalone"])
async def test_a_corpus_is_followed_from_the_first_request_on_and_changes_no_token(
    ray_cluster: None,
    tiny_model: Path,
    tiny_draft: Path,
    expected: list[list[int]],
    tmp_path: Path,
    method: str,
) -> None:
    settings: dict[str, Any] = {"draft__method": method}
    if method == "standalone":  # which is always late, and seldom right
        settings |= {"draft__model": str(tiny_draft), "draft__timeout_s": 1e-6}
        settings |= {"draft__fallback": "ngram"}
    corpus = tmp_path / "corpus.jsonl"
    texts = [prompt + output for prompt, output in zip(PROMPTS, expected, strict=True)]
    corpus.write_text("\n".join(json.dumps({"input_ids": text}) for text in texts))
    with deployed(
        tiny_model,
        f"corpus-{method}",
        cache__num_pages=200,
        draft__num_steps=4,
        draft__ngram_corpus=str(corpus),
        **settings,
    ) as deployment:
        answers = await ask_all(deployment)
    assert [list(answer.output_ids) for answer in answers] == expected
    assert sum(answer.receipt.accepted_tokens for answer in answers) > len(PROMPTS) * NUM_TOKENS / 2
    if method == "ngram":
        assert all(answer.receipt.num_steps <= 2 + (NUM_TOKENS - 1) // 5 for answer in answers)


async def test_full_queue_refuses_at_once_and_says_when_to_come_back(
    ray_cluster: None, tiny_model: Path, expected: list[list[int]]
) -> None:
    with deployed(
        tiny_model,
        "full-queue",
        cache__num_pages=64,
        cache__enable_prefix_caching=False,
        scheduler__max_num_seqs=1,
        queue__max_num_reqs=2,
    ) as deployment:
        async with PacelineClient(deployment.grpc_address) as client:
            running = client.generate(
                input_ids=PROMPTS[0], temperature=0.0, max_tokens=480, ignore_eos=True
            )
            await anext(running)
            waiting = [
                asyncio.create_task(
                    client.generate_text(
                        input_ids=PROMPTS[i],
                        temperature=0.0,
                        max_tokens=NUM_TOKENS,
                        ignore_eos=True,
                    )
                )
                for i in (1, 2)
            ]
            await wait_for_queue(client, 2)
            with pytest.raises(Overloaded) as caught:
                await client.generate_text(input_ids=PROMPTS[3], max_tokens=4)
            assert caught.value.retry_after_s > 0
            assert "2" in caught.value.message
            async with httpx.AsyncClient(trust_env=False) as http:
                response = await http.post(
                    f"{deployment.http_url}/v1/completions", json={"prompt": "x", "max_tokens": 4}
                )
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            await running.aclose()  # type: ignore[attr-defined]  # an async generator
            answers = await asyncio.gather(*waiting)
        assert [list(answer.output_ids) for answer in answers] == expected[1:3]
        address = group_info(deployment, "target-0").address
        wait_for(lambda: snapshot(address).num_free_pages == 64)
        assert snapshot(address).num_orphaned_pages == 0


def is_idle(deployment: Deployment, group_id: str) -> bool:
    """Whether the deployment's status says so: all pages of the group can be had."""
    group = group_info(deployment, group_id)
    return 0 < group.num_pages == group.num_free_pages and not group.num_running_reqs


async def wait_for_queue(client: PacelineClient, num_reqs: int) -> None:
    async with asyncio.timeout(20):
        while (await client.server_info()).num_queued_reqs != num_reqs:
            await asyncio.sleep(0.01)
