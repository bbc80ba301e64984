"""A head beside its target, served whole: no group of its own, the same answers, and what is made
up is called so."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import ray

from paceline.cluster.cli import main as cli
from paceline.cluster.client import PacelineClient
from paceline.cluster.launch import Deployment
from paceline.protos.v1 import generation_pb2
from paceline.protos.v1.generation_pb2_grpc import GenerationServiceStub
from tests.colocated_models import ColocatedModels, make_colocated_models
from tests.deployment import Judge, deployed, group_info, local_ray, snapshot
from tests.polling import wait_for
from tests.tiny_heads import HeadSizes, make_eagle3_head

PROMPTS = [[3 + i, 99, 150 - 7 * i, 20, 4 * i + 1] * (1 + i) for i in range(5)]
NUM_TOKENS = 20
SEEDED = {"temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with local_ray(tmp_path_factory.mktemp("ray")):
        yield


@pytest.fixture(scope="module")
def seeded(ray_cluster: None, models: ColocatedModels) -> list[list[int]]:
    """What a deployment without a draft answers by chance."""
    with deployed(models.target, "plain", cache__num_pages=200) as deployment:
        return [list(a.output_ids) for a in asyncio.run(ask_all(deployment, **SEEDED))]


async def ask_all(deployment: Deployment, **sampling: Any) -> list[Any]:
    settings = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling
    async with PacelineClient(deployment.grpc_address) as client:
        return await asyncio.gather(
            *(client.generate_text(input_ids=prompt, **settings) for prompt in PROMPTS)
        )


def server_info(deployment: Deployment) -> generation_pb2.GetServerInfoResponse:
    with grpc.insecure_channel(deployment.grpc_address) as channel:
        return GenerationServiceStub(channel).GetServerInfo(
            generation_pb2.GetServerInfoRequest(), timeout=10
        )


def all_pages_are_back(deployment: Deployment) -> bool:
    held = snapshot(group_info(deployment, "target-0").address)
    assert held.num_orphaned_pages == 0
    return held.num_free_pages + held.num_cached_pages == held.num_pages


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}),
        ("eagle3", {"overlap": "on"}),
        ("eagle", {"num_steps": 2}),
        ("standalone", {"placement": "colocated"}),
    ],
    ids=["eagle3 tree", "eagle3 overlapped", "eagle chain", "standalone"],
)
async def test_answers_equal_plain_ones_and_no_draft_group_is_started(
    ray_cluster: None,
    models: ColocatedModels,
    seeded: list[list[int]],
    kind: Any,
    settings: dict[str, Any],
) -> None:
    judge = Judge(models.target)
    with deployed(
        models.target,
        f"head-{kind}",
        draft__model=str(models.drafts[kind]),
        draft__adaptive=False,
        cache__num_pages=200,
        **{f"draft__{name}": value for name, value in settings.items()},
    ) as deployment:
        assert deployment.pids().keys() == {"controller", "target-0", "front-0"}
        greedy = await ask_all(deployment)
        by_chance = await ask_all(deployment, **SEEDED)
        info = server_info(deployment)
        assert wait_for(lambda: all_pages_are_back(deployment))
    assert [list(answer.output_ids) for answer in greedy] == [
        judge.greedy(prompt, NUM_TOKENS) for prompt in PROMPTS
    ]
    assert [list(answer.output_ids) for answer in by_chance] == seeded
    assert info.speculative_method == kind
    receipts = [answer.receipt for answer in greedy]
    assert all(receipt.proposed_tokens for receipt in receipts)
    assert sum(receipt.accepted_tokens for receipt in receipts) > NUM_TOKENS
    assert not any(receipt.is_simulated for receipt in receipts)


async def test_made_up_acceptance_is_called_so_wherever_it_shows(
    ray_cluster: None, models: ColocatedModels, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed(
        models.target,
        "simulated",
        draft__model=str(models.drafts["eagle3"]),
        draft__simulated_accept_length=2.0,
        cache__num_pages=200,
    ) as deployment:
        answers = await ask_all(deployment, max_tokens=41)
        info = server_info(deployment)
        async with httpx.AsyncClient(base_url=deployment.http_url, trust_env=False) as http:
            body = {"prompt": PROMPTS[0], "max_tokens": 3}
            answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
            metrics = (await http.get("/metrics")).text
        command = ["status", "--address", deployment.grpc_address]
        assert await asyncio.to_thread(cli.run, command) == 0
    receipts = [answer.receipt for answer in answers]
    assert all(receipt.is_simulated for receipt in receipts)
    # The first token is the prompt's; then two a step.
    assert [receipt.num_steps for receipt in receipts] == [21] * len(PROMPTS)
    assert info.simulated_accept_length == 2.0
    assert answer["paceline"]["is_simulated"] is True
    labels = f'{{model_name="{models.target.name}"}}'
    assert f"paceline_spec_decode_simulated_accept_length{labels} 2.0" in metrics.splitlines()
    assert "eagle3 (ACCEPTANCE SIMULATED, 2 tokens/step)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--draft {wide}", "use a head trained for"),
        ("--draft {eagle3} --spec-method eagle", "is a head of kind 'eagle3', but the method"),
        ("--draft {eagle3} --draft-placement decoupled", "a head reads its target's hidden states"),
        ("--draft {eagle3} --speculative-topk 2 --speculative-num-draft-tokens 99", "at most"),
        ("--draft {eagle3} --simulated-accept-length 17", "must be in 1..5"),
        ("--draft {eagle3} --spec-threshold-acc 0.5", "rule 'coupled' knows no threshold"),
        ("--draft {eagle3} --spec-rule perhaps", "--spec-rule ('draft.rule') is 'perhaps'"),
        ("--draft {eagle3}/none", "is neither built in nor a directory that exists"),
        ("--draft auto", "no draft ships for model"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    flags: str,
    words: str,
    models: ColocatedModels,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide = make_eagle3_head(tmp_path / "wide", HeadSizes(target_hidden_size=80)).path
    line = flags.format(wide=wide, **models.drafts)
    # A Ray that is there would be joined by a start; none may be asked for.
    was_running = ray.is_initialized()
    command = ["serve", str(models.target), "--ray-address", "127.0.0.1:1", *line.split()]
    assert cli.run(command) == cli.EXIT_REFUSED
    assert words in capsys.readouterr().err
    assert ray.is_initialized() == was_running
