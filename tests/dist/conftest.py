"""A front over a scripted controller and leader, all of them real servers in the test's loop."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from paceline.cluster.front.requests import FrontLimits
from paceline.cluster.front.server import FrontServer, FrontSettings
from paceline.protos.v1.generation_pb2_grpc import GenerationServiceStub
from paceline.worker.models.registry import load_model_config
from tests.fake_cluster import FakeController, FakeLeader, poll


@dataclass
class Front:
    server: FrontServer
    controller: FakeController
    leader: FakeLeader
    settings: FrontSettings
    grpc_address: str
    http_url: str
    channel: grpc.aio.Channel
    stub: GenerationServiceStub
    http: httpx.AsyncClient


LIMITS = FrontLimits(max_message_bytes=1 << 20, max_body_bytes=1 << 19, controller_wait_s=5.0)


@pytest.fixture
async def front(tiny_model: Path) -> AsyncIterator[Front]:
    leader = FakeLeader()
    await leader.start()
    controller = FakeController(leader)
    await controller.start()
    settings = FrontSettings(
        model_dir=tiny_model,
        model=load_model_config(tiny_model),
        resolve_controller=controller.resolve,
        served_model_names=("tiny", "tiny-alias"),
        grpc_port=0,
        http_port=0,
        limits=LIMITS,
    )
    server = FrontServer(settings)
    grpc_port, http_port = await server.start()
    address = f"127.0.0.1:{grpc_port}"
    url = f"http://127.0.0.1:{http_port}"
    async with (
        grpc.aio.insecure_channel(address) as channel,
        httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as http,
    ):
        await poll(lambda: server.is_ready)
        yield Front(
            server,
            controller,
            leader,
            settings,
            address,
            url,
            channel,
            GenerationServiceStub(channel),
            http,
        )
        leader.script.gate.set()
        controller.gate.set()
        await server.stop(0.0)
    await controller.stop()
    await leader.stop()
