"""The processes of a Ray that was started here: kept out of our signals, watched, and ended.

Ray starts them in the caller's process group. A SIGTERM to that group (of `timeout`, of a shell)
would end them at the moment in which the deployment needs them for its drain.
"""

import atexit
import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import ray._private.services

_CORE = ("gcs_server", "raylet")  # without one of them, calls into Ray block for a minute
_CONNECT_S = 0.5


@dataclass(frozen=True, slots=True)
class Process:
    """A pid and when it began: a number that was given to another process is not it."""

    pid: int
    create_time: float
    name: str = ""

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return (
                process.create_time() == self.create_time
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False

    def kill(self) -> None:
        if self.is_alive:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.pid).kill()


def descendants() -> list[Process]:
    """All that this process has started and what that has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.append(Process(process.pid, process.create_time(), process.name()))
    return found


class Core:
    """What each call into the local Ray, just started by this process, needs."""

    def __init__(self) -> None:
        self._processes = [process for process in descendants() if process.name in _CORE]
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._gcs_address = (host, int(port))

    def is_lost(self) -> bool:
        if not all(process.is_alive for process in self._processes):
            return True
        # Told to end, a GCS may close its listener and stay.
        try:
            socket.create_connection(self._gcs_address, _CONNECT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:  # busy
            return False
        return False


@contextmanager
def in_groups_of_their_own() -> Iterator[None]:
    """What Ray starts meanwhile leads a process group, so that ours can be signalled alone.

    Ray has no option for it. They still die with this process: Ray asks the kernel for that.
    """
    services: Any = ray._private.services
    popen = getattr(services, "ConsolePopen", None)
    if popen is None:  # a Ray that starts them otherwise
        yield
        return
    services.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def abandon_ray() -> None:
    """Ends what a Ray that lost its core has left, and calls it no more, not even at exit."""
    for process in descendants():
        process.kill()
    atexit.unregister(ray.shutdown)
