"""A front's listeners: taken ports, TLS, API keys, pings, the end."""

import asyncio
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.cluster.client import PacelineClient
from paceline.cluster.front.errors import PermissionDenied, Unauthenticated, from_rpc_error
from paceline.cluster.front.server import FrontServer, FrontSettings, TlsFiles
from paceline.protos.v1 import admin_pb2, generation_pb2
from paceline.protos.v1.admin_pb2_grpc import AdminServiceStub
from paceline.protos.v1.generation_pb2_grpc import GenerationServiceStub
from paceline.worker.errors import ConfigError, Unavailable
from tests.dist.conftest import Front
from tests.fake_cluster import poll


@asynccontextmanager
async def another(front: Front, **changes: Any) -> AsyncIterator[tuple[FrontServer, int, int]]:
    """A second front over the same controller."""
    server = FrontServer(dataclasses.replace(front.settings, **changes))
    grpc_port, http_port = await server.start()
    try:
        yield server, grpc_port, http_port
    finally:
        await server.stop(0.0)


@pytest.mark.parametrize(
    ("setting", "flag"), [("grpc_port", "--grpc-port"), ("http_port", "--port")]
)
async def test_a_taken_port_is_a_config_error_with_the_way_out(
    front: Front, setting: str, flag: str
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            async with another(front, **{setting: port}):
                pass
    message = str(caught.value)
    assert f"port {port} on 127.0.0.1" in message
    assert "in use" in message
    assert flag in message
    assert "0 for any" in message


async def test_a_front_that_could_not_start_holds_no_port(front: Front) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http_port = probe.getsockname()[1]
    taken = int(front.grpc_address.rpartition(":")[2])
    with pytest.raises(ConfigError):
        async with another(front, grpc_port=taken, http_port=http_port):
            pass
    async with another(front, http_port=http_port) as (_, _, port):
        assert port == http_port


async def test_a_host_that_is_not_here_is_a_config_error(front: Front) -> None:
    with pytest.raises(ConfigError, match="--host"):
        async with another(front, host="no-such-host.invalid"):
            pass


async def test_keys_guard_both_faces_but_not_probes(front: Front) -> None:
    async with another(front, api_keys=["user-key"], admin_api_keys=["admin-key"]) as started:
        _, grpc_port, http_port = started
        address = f"127.0.0.1:{grpc_port}"
        for key in ("", "wrong"):
            async with PacelineClient(address, api_key=key) as client:
                with pytest.raises(Unauthenticated, match="API key"):
                    await client.generate_text("x", max_tokens=1)
                with pytest.raises(Unauthenticated):
                    await client.model_info()
        async with PacelineClient(address, api_key="user-key") as client:
            assert (await client.generate_text("x", max_tokens=1)).text == "x"
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            admin = AdminServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.Snapshot(
                    admin_pb2.SnapshotRequest(), metadata=(("authorization", "Bearer user-key"),)
                )
            assert isinstance(from_rpc_error(caught.value), PermissionDenied)
            await admin.Snapshot(
                admin_pb2.SnapshotRequest(), metadata=(("authorization", "Bearer admin-key"),)
            )
        url = f"http://127.0.0.1:{http_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            refused = await http.get("/v1/models")
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            headers = {"authorization": "Bearer user-key"}
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
            assert (await http.get("/live")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200


async def test_tls_guards_both_faces_and_asks_for_client_certificates(
    front: Front, tmp_path: Path
) -> None:
    authority = trustme.CA()
    server_cert = authority.issue_cert("127.0.0.1", "localhost")
    client_cert = authority.issue_cert("client")
    key, cert, ca = (str(tmp_path / name) for name in ("key.pem", "cert.pem", "ca.pem"))
    server_cert.private_key_pem.write_to_path(key)
    server_cert.cert_chain_pems[0].write_to_path(cert)
    authority.cert_pem.write_to_path(ca)
    ca_bytes = authority.cert_pem.bytes()
    tls = TlsFiles(key_file=key, cert_file=cert, ca_certs=ca)
    async with another(front, tls=tls) as (_, grpc_port, http_port):
        credentials = grpc.ssl_channel_credentials(
            ca_bytes,
            client_cert.private_key_pem.bytes(),
            client_cert.cert_chain_pems[0].bytes(),
        )
        address = f"localhost:{grpc_port}"
        async with grpc.aio.secure_channel(address, credentials) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        nameless = grpc.ssl_channel_credentials(ca_bytes)
        async with grpc.aio.secure_channel(address, nameless) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=5
                )
        url = f"https://localhost:{http_port}"
        context = ssl.create_default_context(cafile=ca)
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{url}/live")
        with client_cert.private_key_and_cert_chain_pem.tempfile() as pem:
            context.load_cert_chain(pem)
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            assert (await http.get(f"{url}/live")).status_code == 200


async def test_a_tls_file_that_is_missing_is_a_config_error(front: Front) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        async with another(front, tls=TlsFiles(key_file="nowhere.pem", cert_file="nowhere.pem")):
            pass


async def test_a_client_that_pings_through_a_silent_prefill_is_not_sent_away(
    front: Front,
) -> None:
    front.leader.script.gate.clear()
    options = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with grpc.aio.insecure_channel(front.grpc_address, options) as channel:
        request = generation_pb2.GenerateRequest(text="x")
        request.sampling_params.max_tokens = 1
        read = asyncio.ensure_future(GenerationServiceStub(channel).Generate(request).read())
        # A listener with gRPC's defaults ends such a connection after 4 s (too_many_pings).
        done, _ = await asyncio.wait({read}, timeout=4.8)
        assert not done
        front.leader.script.gate.set()
        assert (await read).complete.text == "x"


async def test_stop_waits_for_running_requests_on_both_faces(front: Front) -> None:
    front.leader.script.gate.clear()
    server = FrontServer(front.settings)
    grpc_port, http_port = await server.start()
    async with (
        PacelineClient(f"127.0.0.1:{grpc_port}") as client,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", trust_env=False) as http,
    ):
        over_grpc = asyncio.ensure_future(client.generate_text("hello", max_tokens=8))
        body = {"prompt": "hello", "max_tokens": 8}
        over_http = asyncio.ensure_future(http.post("/v1/completions", json=body, timeout=30))
        await poll(lambda: len(front.leader.running) == 2)
        stop = asyncio.ensure_future(server.stop(20.0))
        await poll(lambda: server.core.is_draining)
        with pytest.raises(Unavailable, match="draining"):
            await client.generate_text("x", max_tokens=1)
        front.leader.script.gate.set()
        assert (await over_grpc).text == "hellohel"
        assert (await over_http).json()["choices"][0]["text"] == "hellohel"
        assert await stop == 0
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", http_port)


async def test_stop_without_grace_aborts_and_says_so(front: Front) -> None:
    front.leader.script.gate.clear()
    server = FrontServer(front.settings)
    grpc_port, _ = await server.start()
    async with PacelineClient(f"127.0.0.1:{grpc_port}") as client:
        asked = asyncio.ensure_future(client.generate_text("x", request_id="cut", max_tokens=1))
        await poll(lambda: "cut" in front.leader.running)
        assert await server.stop(0.0) == 1
        with pytest.raises(Unavailable, match="again"):
            await asked
    await poll(lambda: front.leader.aborts == ["cut"])


async def test_a_front_reads_the_model_itself_when_it_is_not_given(
    front: Front, tiny_model: Path
) -> None:
    async with another(front, model=None, max_model_len=64, served_model_names=()) as started:
        server, _, _ = started
        assert server.core.model.max_model_len == 64
        assert server.core.model.names == (tiny_model.name,)


def test_an_unknown_model_directory_is_refused_at_once(front: Front, tmp_path: Path) -> None:
    settings = dataclasses.replace(front.settings, model_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        FrontServer(settings)
    assert isinstance(settings, FrontSettings)
