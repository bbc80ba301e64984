"""DraftLeader: rank 0 of a draft group: a proposer behind its gRPC server.

A plain class; cluster/group/spawn.py wraps it for Ray, and the controller drives it as it drives a
target's leader. What it serves and how is worker/draft's.
"""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import ray

from paceline.cluster.group.leader import LeaderInfo
from paceline.cluster.group.settings import RankSettings, worker_config
from paceline.worker.errors import Unavailable
from paceline.worker.telemetry import configure_logging

if TYPE_CHECKING:
    import socket

    from paceline.worker.config import WorkerConfig
    from paceline.worker.draft.proposer import Proposer
    from paceline.worker.draft.server import DraftServer

log = logging.getLogger(__name__)


class DraftLeader:
    def __init__(self, settings: RankSettings) -> None:
        configure_logging(f"{settings.group_id}/0")
        self._settings = settings
        self._host = settings.host or ray.util.get_node_ip_address()
        self._progress = ("start", 0.0)
        self._listener: socket.socket | None = None
        self._server: DraftServer | None = None
        self._is_stopping = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def progress(self) -> tuple[str, float]:
        """What is being built, and how much of that is."""
        return self._progress

    async def reserve(self) -> str:
        """host:port where the ranks of this group shall meet; empty for a rank that is alone."""
        if self._settings.tp_size == 1:
            return ""
        from paceline.worker.parallel.rendezvous import reserve_rendezvous

        self._listener, rendezvous = reserve_rendezvous(self._host)
        return rendezvous

    async def build(self, rendezvous: str) -> LeaderInfo:
        """Loads the draft model and opens the listener.

        Raises: ConfigError, NotFound, Unavailable: as `build_executor`.
        """
        from paceline.worker.draft.server import DraftServer
        from paceline.worker.spec.vocab import vocab_hash

        config, proposer = await asyncio.to_thread(self._build, rendezvous)
        self._server = DraftServer(
            proposer,
            vocab_hash=vocab_hash(config.model.path),
            vocab_size=config.model.vocab_size,
            group_id=self._settings.group_id,
        )
        port = await self._server.start(self._host, 0)
        self._progress = ("ready", 1.0)
        return LeaderInfo(f"{self._host}:{port}", proposer.executor.num_pages, config.model)

    async def run(self) -> None:
        """Serves until `stop`. Raises: Unavailable: the device was lost, and with it the group."""
        assert self._server is not None, "run before build"
        failure = asyncio.create_task(self._server.wait_for_failure())
        stopping = asyncio.create_task(self._is_stopping.wait())
        done, pending = await asyncio.wait((failure, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if failure in done:
            raise Unavailable(f"the device of draft group {self._settings.group_id} was lost")

    async def drain(self, timeout_s: float) -> int:
        """Nothing: a draft holds no request of its own."""
        return 0

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(1.0)
        self._is_stopping.set()

    def _build(self, rendezvous: str) -> "tuple[WorkerConfig, Proposer]":
        from paceline.worker.draft.proposer import build_proposer

        config = worker_config(self._settings, rendezvous, self._tell)
        listener, self._listener = self._listener, None
        return config, build_proposer(config, self._tell, listener=listener)

    def _tell(self, stage: str, fraction: float) -> None:
        self._progress = (stage, fraction)
