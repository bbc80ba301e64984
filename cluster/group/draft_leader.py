"""DraftLeader: rank 0 of a draft group: a proposer behind its gRPC server.

A plain class; cluster/group/spawn.py wraps it for Ray, and the controller drives it as it drives a
target's leader. What it serves and how is worker/draft's.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from paceline.cluster.group.leader import LeaderInfo
from paceline.cluster.group.rank_start import RankStart
from paceline.cluster.group.settings import RankSettings
from paceline.worker.errors import Unavailable

if TYPE_CHECKING:
    from paceline.worker.config import WorkerConfig
    from paceline.worker.draft.proposer import Proposer
    from paceline.worker.draft.server import DraftServer

log = logging.getLogger(__name__)


class DraftLeader:
    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._start = RankStart(settings)
        self._server: DraftServer | None = None
        self._is_stopping = asyncio.Event()

    async def pid(self) -> int:
        return self._start.pid

    async def progress(self) -> tuple[str, float]:
        return self._start.progress

    async def reserve(self) -> str:
        return self._start.reserve()

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
        port = await self._server.start(self._start.host, 0)
        self._start.tell("ready", 1.0)
        return LeaderInfo(f"{self._start.host}:{port}", proposer.executor.num_pages, config.model)

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

        start = self._start
        config = start.config(rendezvous)
        return config, build_proposer(config, start.tell, listener=start.take_listener())
