"""RankStart: what the actor of every rank holds before there is a model: who it is, how far it has
come, and where the ranks of its group shall meet.

Part of GroupLeader, DraftLeader and GroupRank. What they build is theirs.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import ray

from paceline.cluster.group.settings import RankSettings, worker_config
from paceline.worker.telemetry import configure_logging

if TYPE_CHECKING:
    import socket

    from paceline.worker.config import WorkerConfig


class RankStart:
    """`progress` is what is being built, and how much of that is."""

    def __init__(self, settings: RankSettings) -> None:
        configure_logging(f"{settings.group_id}/{settings.tp_rank}")
        self.settings = settings
        self.pid = os.getpid()
        self.host = settings.host or ray.util.get_node_ip_address()
        self.progress = ("start", 0.0)
        # Builds the model and then runs it: a thread that computes has OpenMP threads of its own,
        # and where two threads did, a step of a 135M model took 43 ms instead of 22 on 2 cores.
        self.device_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._listener: socket.socket | None = None

    def tell(self, stage: str, fraction: float) -> None:
        self.progress = (stage, fraction)

    def reserve(self) -> str:
        """host:port where the ranks of this group shall meet; empty for a rank that is alone."""
        if self.settings.tp_size == 1:
            return ""
        from paceline.worker.parallel.rendezvous import reserve_rendezvous

        self._listener, rendezvous = reserve_rendezvous(self.host)
        return rendezvous

    def take_listener(self) -> "socket.socket | None":
        """The reserved place, to be listened at by who takes it."""
        listener, self._listener = self._listener, None
        return listener

    def config(self, rendezvous: str) -> "WorkerConfig":
        """Raises: ConfigError, NotFound, Unavailable: the model cannot be had or served."""
        return worker_config(self.settings, rendezvous, self.tell)
