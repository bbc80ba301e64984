"""Starts that cannot succeed say why, in time, and leave nothing behind."""

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import placement_group_table

from paceline.cluster.config import load_config
from paceline.cluster.launch import start
from paceline.cluster.placement.bundles import GroupPlan, GroupRequest, Resources
from paceline.cluster.placement.groups import (
    PlacementError,
    create_placement_group,
    view_nodes,
    wait_for_room,
)
from paceline.worker.errors import ConfigError, NotFound, PacelineError
from tests.deployment import local_ray
from tests.polling import wait_for
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with local_ray(tmp_path_factory.mktemp("ray"), num_cpus=2):
        yield


def try_start(**settings: Any) -> PacelineError:
    base = {
        "dtype": "float32",
        "front.port": 0,
        "front.grpc_port": 0,
        "ray.namespace": "failing",
        "ray.num_cpus_per_rank": 0.1,
        "ray.threads_per_rank": 1,
        "cache.num_pages": 100,
    }
    with pytest.raises(PacelineError) as caught:
        start(load_config(None, base | {k.replace("__", "."): v for k, v in settings.items()}))
    return caught.value


def assert_nothing_is_left() -> None:
    wait_for(lambda: not ray.util.list_named_actors(all_namespaces=True), 15.0)
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())


def test_group_that_fits_nowhere_is_refused_in_time_per_bundle(
    ray_cluster: None, tiny_model: Path
) -> None:
    began_s = time.monotonic()
    error = try_start(
        model=str(tiny_model),
        target__tensor_parallel_size=9,
        ray__num_cpus_per_rank=0.5,
        ray__placement_timeout_s=1.0,
    )
    assert time.monotonic() - began_s < 60.0
    assert isinstance(error, PlacementError)
    assert "group target-0: 9 ranks asked, 4 can be placed" in error.message
    assert "bundle 4 asks CPU 0.5: fits on no node" in error.message
    assert "in all CPU 2" in error.message
    assert "lower --tensor-parallel-size to 4" in error.message
    assert_nothing_is_left()


async def test_wait_for_room_ends_at_its_limit_and_reports_meanwhile(ray_cluster: None) -> None:
    told: list[str] = []
    request = GroupRequest("target-0", 3, Resources(1.0))
    with pytest.raises(PlacementError, match=r"no room within 0\.6 s"):
        await wait_for_room([request], 0.6, can_grow=True, progress=told.append)
    assert told
    assert "target-0: 2/3 ranks fit" in told[0]


async def test_reservation_that_ray_cannot_place_is_withdrawn(ray_cluster: None) -> None:
    node_ids = (view_nodes()[0].node_id,) * 3
    plan = GroupPlan("late", "STRICT_PACK", (Resources(1.0),) * 3, node_ids)
    with pytest.raises(PlacementError, match="did not place group late within"):
        await create_placement_group(plan, "late-group", 0.5)
    await asyncio.to_thread(assert_nothing_is_left)


def test_model_that_is_not_there_is_named_with_what_is_built_in(tmp_path: Path) -> None:
    error = try_start(model=str(tmp_path / "nothing"))
    assert isinstance(error, NotFound)
    assert "smollm2-135m" in error.message


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "config.json" in try_start(model=str(tmp_path)).message


def test_draft_of_another_vocabulary_is_refused_before_any_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<spare1>", "<other1>"))
    error = try_start(model=str(tiny_model), draft__method="standalone", draft__model=str(other))
    assert isinstance(error, ConfigError)
    assert "another vocabulary" in error.message


def test_auto_draft_of_a_model_without_one_is_refused(tiny_model: Path) -> None:
    error = try_start(model=str(tiny_model), draft__method="standalone", draft__model="auto")
    assert "no draft ships" in error.message


def test_port_in_use_is_named_with_its_flag(tiny_model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        error = try_start(model=str(tiny_model), front__grpc_port=port)
    assert isinstance(error, ConfigError)
    assert str(port) in error.message
    assert "--grpc-port" in error.message


@pytest.mark.parametrize(("num_fronts", "http", "said"), [(1, 47001, 47001), (2, 47000, 47001)])
def test_port_that_http_and_grpc_would_share_is_named(
    num_fronts: int, http: int, said: int, tiny_model: Path
) -> None:
    error = try_start(
        model=str(tiny_model), front__port=http, front__grpc_port=47001, front__count=num_fronts
    )
    assert isinstance(error, ConfigError)
    assert f"port {said} is asked for twice" in error.message
    assert "--grpc-port" in error.message


def test_second_deployment_in_one_namespace_is_refused(ray_cluster: None, tiny_model: Path) -> None:
    settings = {
        "model": str(tiny_model),
        "dtype": "float32",
        "front.port": 0,
        "front.grpc_port": 0,
        "ray.namespace": "failing",
        "ray.num_cpus_per_rank": 0.1,
        "cache.num_pages": 100,
    }
    first = start(load_config(None, settings))
    try:
        error = try_start(model=str(tiny_model))
        assert "runs already in the Ray namespace 'failing'" in error.message
        assert first.is_alive()
    finally:
        first.stop()
    assert_nothing_is_left()


def test_pool_too_small_for_one_request_is_refused_with_the_way_out(
    ray_cluster: None, tiny_model: Path
) -> None:
    error = try_start(model=str(tiny_model), cache__num_pages=4)
    assert isinstance(error, ConfigError)
    assert "max_model_len" in error.message
    assert_nothing_is_left()
