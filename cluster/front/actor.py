"""FrontActor: one front in a process of its own. A plain class, wrapped for Ray where it starts.

The controller starts and watches it; requests never pass through Ray.
"""

import asyncio
import logging
import os
from dataclasses import dataclass

import ray

from paceline.cluster.config import FrontSection
from paceline.cluster.front.server import FrontServer, FrontSettings, TlsFiles
from paceline.cluster.group.settings import ModelRef, find_model
from paceline.cluster.naming import controller_resolver
from paceline.worker.config import ModelConfig
from paceline.worker.telemetry import configure_logging

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontSpec:
    """What one front is told; ports are its own, 0 for any free one."""

    index: int
    model_ref: ModelRef
    model: ModelConfig  # as the leaders read it; the front itself loads no torch
    served_model_names: tuple[str, ...]
    section: FrontSection
    port: int
    grpc_port: int
    speculative_method: str
    simulated_accept_length: float  # 0: for real
    namespace: str


def front_settings(spec: FrontSpec) -> FrontSettings:
    """Raises: Unavailable: the tokenizer of a built-in model could not be fetched."""
    section = spec.section
    tls = None
    if section.ssl_certfile:
        tls = TlsFiles(
            section.ssl_keyfile,
            section.ssl_certfile,
            section.ssl_ca_certs,
            section.ssl_keyfile_password,
        )
    return FrontSettings(
        model_dir=find_model(spec.model_ref),
        resolve_controller=controller_resolver(spec.namespace),
        model=spec.model,
        served_model_names=spec.served_model_names,
        host=section.host,
        grpc_port=spec.grpc_port,
        http_port=spec.port,
        speculative_method=spec.speculative_method,
        simulated_accept_length=spec.simulated_accept_length,
        api_keys=section.api_keys,
        admin_api_keys=section.admin_api_keys,
        tls=tls,
    )


class FrontActor:
    def __init__(self, spec: FrontSpec) -> None:
        configure_logging(f"front-{spec.index}")
        self._spec = spec
        self._server: FrontServer | None = None
        self._has_stopped = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def start(self) -> tuple[str, str]:
        """host:port of its gRPC and of its HTTP listener, as others reach them.

        Raises: ConfigError: a port is taken, or a TLS file cannot be read.
        """
        settings = await asyncio.to_thread(front_settings, self._spec)
        self._server = FrontServer(settings)
        grpc_port, http_port = await self._server.start()
        host = settings.host
        if host in ("", "0.0.0.0", "::"):
            host = ray.util.get_node_ip_address()
        if ":" in host:
            host = f"[{host}]"
        return f"{host}:{grpc_port}", f"{host}:{http_port}"

    async def run(self) -> None:
        """Until `stop`; the controller awaits it to learn of a death."""
        await self._has_stopped.wait()

    async def stop(self, grace_s: float) -> int:
        """Lets running requests end for `grace_s`; how many were aborted."""
        num_aborted = 0
        if self._server is not None:
            num_aborted = await self._server.stop(grace_s)
        self._has_stopped.set()
        return num_aborted
