"""GroupRank: ranks above 0 of a group, target or draft. It builds its shard and follows.

A plain class; cluster/group/spawn.py wraps it for Ray. What a follower needs to know of its
leader comes through their collective, never through Ray.
"""

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import ray

from paceline.cluster.group.settings import RankSettings, worker_config
from paceline.worker.errors import PacelineError
from paceline.worker.telemetry import configure_logging

if TYPE_CHECKING:
    from paceline.worker.target.executor import Executor

log = logging.getLogger(__name__)


class GroupRank:
    def __init__(self, settings: RankSettings) -> None:
        configure_logging(f"{settings.group_id}/{settings.tp_rank}")
        self._settings = settings
        self._progress = ("start", 0.0)
        self._executor: Executor | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def progress(self) -> tuple[str, float]:
        """What is being built, and how much of that is."""
        return self._progress

    async def build(self, rendezvous: str) -> None:
        """Raises: ConfigError, NotFound, Unavailable: as `build_executor`."""
        self._executor = await asyncio.to_thread(self._build, rendezvous)

    async def run(self) -> None:
        """Follows until the leader ends the group; a follower that loses its leader is of no use
        and ends its process."""
        assert self._executor is not None, "run before build"
        try:
            await asyncio.to_thread(self._executor.follow)
        except PacelineError as error:
            log.error("follower lost its leader tp_rank=%d: %s", self._settings.tp_rank, error)
        ray.actor.exit_actor()

    def _build(self, rendezvous: str) -> "Executor":
        from paceline.worker.target.build import build_executor

        config = worker_config(self._settings, rendezvous, self._tell)
        return build_executor(config, self._tell)

    def _tell(self, stage: str, fraction: float) -> None:
        self._progress = (stage, fraction)
