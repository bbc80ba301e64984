"""DraftLeader: rank 0 of a draft group: a proposer behind its gRPC server, and load reports.

A plain class; cluster/group/spawn.py wraps it for Ray, and the controller drives it as it drives a
target's leader. What it serves and how is worker/draft's.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from paceline.cluster.group.leader import LeaderInfo
from paceline.cluster.group.rank_start import RankStart
from paceline.cluster.group.reporter import Reporter
from paceline.cluster.group.settings import RankSettings
from paceline.cluster.naming import controller_resolver
from paceline.cluster.scheduling.dispatch import GroupLoad
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
        self._address = ""
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

        config, proposer = await asyncio.get_running_loop().run_in_executor(
            self._start.device_thread, self._build, rendezvous
        )
        self._server = DraftServer(
            proposer,
            vocab_hash=vocab_hash(config.model.path),
            vocab_size=config.model.vocab_size,
            group_id=self._settings.group_id,
            device_thread=self._start.device_thread,
        )
        port = await self._server.start(self._start.host, 0)
        self._address = f"{self._start.host}:{port}"
        self._start.tell("ready", 1.0)
        return LeaderInfo(self._address, proposer.executor.num_pages, config.model)

    async def run(self) -> None:
        """Serves until `stop`. Raises: Unavailable: the device was lost, and with it the group."""
        assert self._server is not None, "run before build"
        # A drain is the targets' affair: a draft serves them to their end.
        reporter = Reporter(self._load, controller_resolver(self._settings.namespace), lambda: None)
        reports = asyncio.create_task(reporter.run())
        failure = asyncio.create_task(self._server.wait_for_failure())
        stopping = asyncio.create_task(self._is_stopping.wait())
        tasks = (failure, stopping, reports)
        try:
            # Reports never end by themselves.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reports in done:
                reports.result()
        finally:
            for task in tasks:
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

    def _load(self) -> GroupLoad:
        assert self._server is not None, "report before build"
        held = self._server.snapshot()
        return GroupLoad(
            group_id=self._settings.group_id,
            page_size=self._settings.cache.page_size,
            num_pages=held.num_pages,
            num_free_pages=held.num_free_pages + held.num_cached_pages,
            num_running_reqs=len(held.req_ids),
            num_waiting_reqs=0,
            max_num_reqs=self._settings.scheduler.max_num_seqs,
            address=self._address,
            step_id=held.step_id,
        )

    def _build(self, rendezvous: str) -> "tuple[WorkerConfig, Proposer]":
        from paceline.worker.draft.proposer import build_proposer

        start = self._start
        config = start.config(rendezvous)
        return config, build_proposer(config, start.tell, listener=start.take_listener())
