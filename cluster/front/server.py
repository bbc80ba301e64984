"""One front: the gRPC and the HTTP listener in one event loop, and their common end.

Knows sockets, TLS and readiness; requests are service.py's.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import uvicorn

from paceline.cluster.front.auth import ApiKeys
from paceline.cluster.front.channels import server_options
from paceline.cluster.front.controller_client import ControllerResolver
from paceline.cluster.front.grpc_api import HealthBoard, KeyInterceptor, add_services
from paceline.cluster.front.http_api import build_http_app
from paceline.cluster.front.requests import FrontLimits
from paceline.cluster.front.served_model import ServedModel
from paceline.cluster.front.service import GenerationCore
from paceline.cluster.front.text import TextCodec
from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

_READINESS_PERIOD_S = 1.0
# A controller that restarts is not a reason to leave the load balancer: new requests wait for it.
_MAX_MISSED_STATUS = 10


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a listener. With `ca_certs`, clients must show a certificate it signed."""

    key_file: str
    cert_file: str
    ca_certs: str = ""
    key_password: str = ""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    model_dir: str | Path
    # Answers host:port of ControllerService now; raises Unavailable when there is none.
    resolve_controller: ControllerResolver
    # What config.json says, where the caller has read it already; read from model_dir otherwise.
    model: ModelConfig | None = None
    served_model_names: Sequence[str] = ()  # the directory's name when empty
    host: str = "127.0.0.1"
    grpc_port: int = 50051  # 0 takes any free one
    http_port: int = 8000  # 0 takes any free one
    max_model_len: int = 0  # 0 takes the model's own
    speculative_method: str = "none"
    simulated_accept_length: float = 0.0  # 0: for real
    limits: FrontLimits = field(default_factory=FrontLimits)
    api_keys: Sequence[str] = ()
    admin_api_keys: Sequence[str] = ()
    tls: TlsFiles | None = None


def build_core(settings: FrontSettings) -> GenerationCore:
    """The protocol-neutral part, for hosts that bring their own listeners.

    Raises: ConfigError, NotFound: the model directory cannot be served.
    """
    model = settings.model
    if model is None:
        # Here and not above: a front with a given model does not need it.
        from paceline.worker.models.registry import load_model_config

        model = load_model_config(settings.model_dir, max_model_len=settings.max_model_len)
    max_model_len = min(settings.max_model_len or model.max_model_len, model.max_model_len)
    served = ServedModel(
        names=tuple(settings.served_model_names) or (Path(settings.model_dir).name,),
        path=str(settings.model_dir),
        architecture=model.architecture,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        num_positions=model.num_positions,
    )
    return GenerationCore(
        served,
        TextCodec.load(settings.model_dir),
        settings.resolve_controller,
        limits=settings.limits,
        speculative_method=settings.speculative_method,
        simulated_accept_length=settings.simulated_accept_length,
    )


class FrontServer:
    """Start once, stop once."""

    def __init__(self, settings: FrontSettings) -> None:
        self._settings = settings
        self.core = build_core(settings)
        self._board = HealthBoard()
        self._grpc: grpc.aio.Server | None = None
        self._http: _HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_ready(self) -> bool:
        return self._board.is_ready

    async def start(self) -> tuple[int, int]:
        """The ports it listens on, gRPC and HTTP.

        Raises: ConfigError: a port is taken, or a TLS file cannot be read; nothing listens then.
        """
        settings = self._settings
        credentials = None if settings.tls is None else _grpc_credentials(settings.tls)
        sock = _bind(settings.host, settings.http_port, "--port")
        try:
            self._http = self._new_http_server()
            self._grpc, grpc_port = await self._start_grpc(credentials)
        except BaseException:
            sock.close()
            raise
        http_port: int = sock.getsockname()[1]
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[sock]), name="front-http"),
            asyncio.create_task(self._watch_readiness(), name="front-readiness"),
        ]
        await self._http.has_started.wait()
        log.info("front listening host=%s grpc=%d http=%d", settings.host, grpc_port, http_port)
        return grpc_port, http_port

    async def stop(self, grace_s: float = 30.0) -> int:
        """Readiness off, running requests may end for `grace_s`, the rest is aborted.

        Returns: the number aborted.
        """
        await self.begin_drain()
        num_aborted = await self.core.drain(grace_s)
        for task in self._tasks[1:]:
            task.cancel()
        if self._grpc is not None:
            await self._grpc.stop(1.0)
        if self._http is not None:
            self._http.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await self._tasks[0]
        await asyncio.gather(*self._tasks[1:], return_exceptions=True)
        await self.core.close()
        log.info("front stopped num_aborted=%d", num_aborted)
        return num_aborted

    async def begin_drain(self) -> None:
        """Not ready any more, and new requests are refused; running ones go on."""
        self.core.begin_drain()
        await self._board.set_ready(is_ready=False)

    async def _start_grpc(
        self, credentials: grpc.ServerCredentials | None
    ) -> tuple[grpc.aio.Server, int]:
        settings = self._settings
        server = grpc.aio.server(
            interceptors=[KeyInterceptor(ApiKeys(settings.api_keys, settings.admin_api_keys))],
            options=server_options(settings.limits.max_message_bytes),
        )
        add_services(server, self.core, self._board, self.begin_drain)
        address = _join(settings.host, settings.grpc_port)
        # gRPC says only "failed to bind"; asking the system first gives the reason.
        _bind(settings.host, settings.grpc_port, "--grpc-port").close()
        try:
            if credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise _port_taken(settings.host, settings.grpc_port, "--grpc-port", error) from None
        await self._board.start()
        await server.start()
        return server, port

    def _new_http_server(self) -> "_HttpServer":
        settings = self._settings
        app = build_http_app(
            self.core, api_keys=settings.api_keys, is_ready=lambda: self._board.is_ready
        )
        tls = settings.tls
        config = uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,
            ws="none",
            timeout_graceful_shutdown=1,
            ssl_keyfile=tls.key_file if tls else None,
            ssl_certfile=tls.cert_file if tls else None,
            ssl_ca_certs=(tls.ca_certs or None) if tls else None,
            ssl_keyfile_password=(tls.key_password or None) if tls else None,
            ssl_cert_reqs=_CERT_REQUIRED if tls and tls.ca_certs else 0,
        )
        config.load()
        return _HttpServer(config)

    async def _watch_readiness(self) -> None:
        num_missed = 0
        while not self.core.is_draining:
            try:
                status = await self.core.status()
            except Unavailable:
                num_missed += 1
                is_ready = self._board.is_ready and num_missed < _MAX_MISSED_STATUS
            else:
                num_missed = 0
                is_ready = any(g.role == "target" and g.state == "ready" for g in status.groups)
            if is_ready != self._board.is_ready and not self.core.is_draining:
                await self._board.set_ready(is_ready=is_ready)
                log.info("front readiness is_ready=%s", is_ready)
            await asyncio.sleep(_READINESS_PERIOD_S if self._board.is_ready else 0.1)


_CERT_REQUIRED = 2  # ssl.CERT_REQUIRED, as uvicorn takes it


class _HttpServer(uvicorn.Server):
    """As a library: signals are the process's business, not the listener's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int, flag: str) -> socket.socket:
    """Raises: ConfigError: the address cannot be had, and why."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on host '{host}': {error.strerror}; set --host to an address of this "
            "machine"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise _port_taken(host, port, flag, error) from None
    return sock


def _port_taken(host: str, port: int, flag: str, error: Exception) -> ConfigError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigError(
        f"port {port} on {host} cannot be used ({reason}); choose another with {flag}, 0 for any "
        "free one, or stop the process that holds it"
    )


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _grpc_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    try:
        key = Path(tls.key_file).read_bytes()
        cert = Path(tls.cert_file).read_bytes()
        ca_certs = Path(tls.ca_certs).read_bytes() if tls.ca_certs else None
    except OSError as error:
        raise ConfigError(f"TLS file {error.filename}: {error.strerror}") from None
    return grpc.ssl_server_credentials(
        [(key, cert)], root_certificates=ca_certs, require_client_auth=ca_certs is not None
    )
