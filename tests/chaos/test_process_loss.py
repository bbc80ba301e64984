"""Processes of a real deployment are killed while it answers: the tokens are those of an
undisturbed run, or a typed error says that it is safe to ask again; and every page comes back."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from paceline.cluster.client import PacelineClient
from paceline.cluster.launch import Deployment
from paceline.worker.errors import Unavailable
from tests.deployment import Judge, deployed, group_info, local_ray, snapshot
from tests.polling import wait_for

PROMPT = [11, 45, 190, 7, 80, 33, 101]
NUM_TOKENS = 160


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with local_ray(tmp_path_factory.mktemp("ray")):
        yield


@pytest.fixture(scope="module")
def deployment(ray_cluster: None, tiny_model: Path, tiny_draft: Path) -> Iterator[Deployment]:
    with deployed(
        tiny_model,
        "chaos",
        target__tensor_parallel_size=2,
        draft__method="standalone",
        draft__model=str(tiny_draft),
        cache__num_pages=400,
    ) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[int]:
    return Judge(tiny_model).greedy(PROMPT, NUM_TOKENS)


async def stream_and(deployment: Deployment, victims: Sequence[int] = ()) -> list[int]:
    """The answer to PROMPT, with some processes killed after its first tokens."""
    ids: list[int] = []
    to_kill = list(victims)
    async with PacelineClient(deployment.grpc_address) as client:
        async for piece in client.generate(
            input_ids=PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
        ):
            ids += piece.token_ids
            while to_kill:
                os.kill(to_kill.pop(), signal.SIGKILL)
            if piece.complete is not None:
                assert list(piece.complete.output_ids) == ids
                assert piece.complete.receipt.fallback_steps > 0 or not victims
    return ids


def is_paired(deployment: Deployment, epoch_above: int) -> bool:
    target = group_info(deployment, "target-0")
    if target.state != "ready" or target.draft_group_id != "draft-0":
        return False
    held = snapshot(target.address)
    return held.draft_attached and held.epoch > epoch_above


def pages_are_back(deployment: Deployment) -> bool:
    held = snapshot(group_info(deployment, "target-0").address)
    assert held.num_orphaned_pages == 0
    return (
        not held.running_req_ids and held.num_free_pages + held.num_cached_pages == held.num_pages
    )


async def test_killed_draft_changes_no_token_and_comes_back(
    deployment: Deployment, expected: list[int]
) -> None:
    wait_for(lambda: is_paired(deployment, 0))
    epoch = group_info(deployment, "target-0").epoch
    old_pids = deployment.pids()["draft-0"]
    assert await stream_and(deployment, old_pids) == expected
    wait_for(lambda: pages_are_back(deployment))

    wait_for(lambda: is_paired(deployment, epoch), 60.0)
    assert deployment.pids()["draft-0"] != old_pids
    async with PacelineClient(deployment.grpc_address) as client:
        complete = await client.generate_text(
            input_ids=PROMPT, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
        )
    assert list(complete.output_ids) == expected
    assert complete.receipt.proposed_tokens > 0
    assert complete.receipt.fallback_steps < complete.receipt.num_steps


async def test_killed_front_is_found_again_where_it_was(
    deployment: Deployment, expected: list[int]
) -> None:
    (pid,) = deployment.pids()["front-0"]
    with pytest.raises(Unavailable):
        await stream_and(deployment, [pid])
    wait_for(lambda: pages_are_back_by_group(deployment))
    wait_for(lambda: is_healthy(deployment), 60.0)
    assert await stream_and(deployment) == expected


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
async def test_killed_target_rank_ends_streams_as_unavailable_and_the_group_is_rebuilt(
    deployment: Deployment, expected: list[int], rank: int
) -> None:
    wait_for(lambda: is_paired(deployment, 0), 60.0)
    before = group_info(deployment, "target-0")
    pids = deployment.pids()["target-0"]
    with pytest.raises(Unavailable):
        await stream_and(deployment, [pids[rank]])
    # Asked while the group is away: it waits in the queue, and is answered by the new group.
    assert await stream_and(deployment) == expected
    wait_for(lambda: is_paired(deployment, before.epoch), 60.0)
    assert not set(deployment.pids()["target-0"]) & set(pids)
    wait_for(lambda: pages_are_back(deployment))


async def test_requests_in_the_queue_outlive_their_group(
    deployment: Deployment, expected: list[int]
) -> None:
    pids = deployment.pids()["target-0"]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    answers = await asyncio.gather(*(stream_and(deployment) for _ in range(3)))
    assert answers == [expected] * 3


def is_healthy(deployment: Deployment) -> bool:
    try:
        return httpx.get(f"{deployment.http_url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def pages_are_back_by_group(deployment: Deployment) -> bool:
    """As `pages_are_back`, while there is no front to ask for the leader's address."""
    return is_healthy(deployment) and pages_are_back(deployment)
