"""A front over a scripted controller and leader, all of them real servers in the test's loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def run_front(model_dir: Path) -> AsyncIterator[Front]:
    leader = FakeLeader()
    await leader.start()
    controller = FakeController(leader)
    await controller.start()
    settings = FrontSettings(
        model_dir=model_dir,
        model=load_model_config(model_dir),
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
        stub = GenerationServiceStub(channel)
        yield Front(server, controller, leader, settings, address, url, channel, stub, http)
        leader.script.gate.set()
        controller.gate.set()
        await server.stop(0.0)
    await controller.stop()
    await leader.stop()


@pytest.fixture
async def front(tiny_model: Path) -> AsyncIterator[Front]:
    async with run_front(tiny_model) as started:
        yield started
