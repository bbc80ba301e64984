"""The Ray Serve application: the same HTTP face behind Serve's proxy."""

import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray

from paceline.cluster.launch import Deployment
from paceline.worker.errors import ConfigError
from tests.deployment import Judge, deployed, local_ray
from tests.polling import wait_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of Ray Serve's own models
    from ray import serve

    from paceline.cluster.serve.app import build_app

PROMPT = [9, 77, 140, 33, 8]


@pytest.fixture(scope="module")
def http_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with local_ray(tmp_path_factory.mktemp("ray")):
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield port
        serve.shutdown()


@pytest.fixture(scope="module")
def running(http_port: int, tiny_model: Path) -> Iterator[Deployment]:
    with deployed(tiny_model, "behind-serve", cache__num_pages=200) as deployment:
        yield deployment


def complete(url: str) -> dict:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    answer: dict = response.raise_for_status().json()
    return answer


def test_app_starts_its_own_deployment_and_ends_it(http_port: int, tiny_model: Path) -> None:
    app = build_app(
        {
            "model": str(tiny_model),
            "dtype": "float32",
            "served_model_names": ["tiny"],
            "target": {"tensor_parallel_size": "2"},
            "cache.num_pages": "200",
            "ray": {"namespace": "in-serve", "num_cpus_per_rank": 0.1, "threads_per_rank": 1},
        }
    )
    serve.run(app, name="own", route_prefix="/own")
    url = f"http://127.0.0.1:{http_port}/own"
    health = httpx.get(f"{url}/health", trust_env=False)
    models = httpx.get(f"{url}/v1/models", trust_env=False).json()
    answer = complete(url)
    text_ids = httpx.post(
        f"{url}/detokenize",
        json={"tokens": Judge(tiny_model).greedy(PROMPT, 12)},
        trust_env=False,
    ).json()["prompt"]
    bad = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "nope": 1}, trust_env=False)
    assert health.status_code == 200
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert answer["choices"][0]["text"] == text_ids
    assert bad.status_code == 400
    assert "nope" in bad.json()["error"]["message"]
    serve.delete("own")
    wait_for(lambda: not _has_controller("in-serve"))


def test_app_stands_in_front_of_a_running_deployment_and_streams(
    running: Deployment, http_port: int
) -> None:
    serve.run(
        build_app({"attach": "true", "ray.namespace": "behind-serve"}),
        name="attached",
        route_prefix="/attached",
    )
    url = f"http://127.0.0.1:{http_port}/attached"
    assert complete(url)["choices"] == complete(running.http_url)["choices"]
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    serve.delete("attached")
    assert running.is_alive()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"model": "m", "drft": 1}, "did you mean 'draft'"),
        ({"attach": True, "model": "m"}, "only ray.namespace"),
        ({"model": "m", "ray.address": "auto"}, "Serve's own cluster"),
        ({"model": "m", "num_replicas": "many"}, "'num_replicas'"),
        ({}, "'model' is missing"),
    ],
)
def test_arguments_that_cannot_be_are_named(args: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_app(args)


def _has_controller(namespace: str) -> bool:
    try:
        ray.get_actor("paceline-controller", namespace)
    except ValueError:
        return False
    return True
