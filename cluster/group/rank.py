"""GroupRank: ranks above 0 of a group, target or draft. It builds its shard and follows.

A plain class; cluster/group/spawn.py wraps it for Ray. What a follower needs to know of its
leader comes through their collective, never through Ray.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

import ray

from paceline.cluster.group.rank_start import RankStart
from paceline.cluster.group.settings import RankSettings
from paceline.worker.errors import PacelineError

if TYPE_CHECKING:
    from paceline.worker.target.executor import Executor

log = logging.getLogger(__name__)


class GroupRank:
    def __init__(self, settings: RankSettings) -> None:
        self._start = RankStart(settings)
        self._executor: Executor | None = None

    async def pid(self) -> int:
        return self._start.pid

    async def progress(self) -> tuple[str, float]:
        return self._start.progress

    async def build(self, rendezvous: str) -> None:
        """Raises: ConfigError, NotFound, Unavailable: as `build_executor`."""
        self._executor = await asyncio.get_running_loop().run_in_executor(
            self._start.device_thread, self._build, rendezvous
        )

    async def run(self) -> None:
        """Follows until the leader ends the group; a follower that loses its leader is of no use
        and ends its process."""
        assert self._executor is not None, "run before build"
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._start.device_thread, self._executor.follow
            )
        except PacelineError as error:
            tp_rank = self._start.settings.tp_rank
            log.error("follower lost its leader tp_rank=%d: %s", tp_rank, error)
        ray.actor.exit_actor()

    def _build(self, rendezvous: str) -> "Executor":
        from paceline.worker.target.build import build_executor

        return build_executor(self._start.config(rendezvous), self._start.tell)
