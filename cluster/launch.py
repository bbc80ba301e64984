"""Starts a deployment on Ray and ends it, leaving no process behind.

`start` begins a Ray cluster of its own on this machine, or joins one, creates the controller and
waits until fronts answer. The deployment belongs to the calling process: should that die, Ray ends
what it started. Knows processes; what runs in them is the controller's.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from paceline.cluster.config import CONTROLLER_NAME, ClusterConfig
from paceline.cluster.controller.actor import Controller
from paceline.cluster.group.spawn import brief, unwrap
from paceline.cluster.preflight import check_local_ports, resolve_models
from paceline.cluster.ray_processes import (
    Core,
    Process,
    abandon_ray,
    descendants,
    in_groups_of_their_own,
)
from paceline.worker.errors import ConfigError, PacelineError, Unavailable

log = logging.getLogger(__name__)

# (process, stage, fraction of the stage)
Progress = Callable[[str, str, float], None]

_POLL_S = 0.2
_STOP_MARGIN_S = 30.0  # beyond the drain, for processes to end
_EXIT_S = 10.0  # for processes to be gone once told
_NOTICE_S = 1.0  # between the end of a controller and that of the Ray under it
_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # nothing of ours goes through it


@dataclass(frozen=True, slots=True)
class StopReport:
    """How an end went; `leftover_pids` is empty unless something is broken."""

    num_aborted: int  # requests
    num_processes: int  # that had been running and are gone
    leftover_pids: tuple[int, ...] = ()
    is_ray_lost: bool = False  # its own processes ended first, so nothing could be drained


@dataclass(slots=True)
class Deployment:
    """A running deployment, as its starter holds it."""

    config: ClusterConfig
    grpc_addresses: tuple[str, ...]  # host:port of each front
    http_addresses: tuple[str, ...]
    _controller: Any  # Any: Ray's handles have their methods at run time only
    _session: "_RaySession"
    log_dir: str = ""  # of Ray on this machine
    _has_stopped: bool = field(default=False)

    @property
    def grpc_address(self) -> str:
        return self.grpc_addresses[0]

    @property
    def http_url(self) -> str:
        scheme = "https" if self.config.front.ssl_certfile else "http"
        return f"{scheme}://{self.http_addresses[0]}"

    def pids(self) -> dict[str, list[int]]:
        """Process ids by group, front and controller, wherever they run."""
        pids: dict[str, list[int]] = _get(self._controller.pids.remote(), 10.0)
        return pids

    def is_alive(self) -> bool:
        """Whether the controller answers."""
        if self._session.is_broken():
            return False
        try:
            _get(self._controller.pid.remote(), 5.0)
        except PacelineError:
            return False
        return True

    def news(self) -> list[str]:
        """What died, did not start again or came back since the last call, a line each."""
        if self._session.is_broken():
            return []
        try:
            lines: list[str] = _get(self._controller.news.remote(), 5.0)
        except PacelineError:
            return []
        return lines

    def stop(
        self, drain_s: float | None = None, hurry: threading.Event | None = None
    ) -> StopReport:
        """Refuses new requests, lets running ones end, then ends every process.

        Args:
            drain_s: how long they may take; None takes the configured time.
            hurry: once set, nothing is waited for any more.
        """
        if self._has_stopped:
            return StopReport(0, 0)
        self._has_stopped = True
        if drain_s is None:
            drain_s = self.config.ray.shutdown_timeout_s
        processes = self._session.processes()
        num_aborted = _shut_down(
            self._controller, self._session, drain_s, hurry or threading.Event()
        )
        is_ray_lost = self._session.is_broken()
        self._session.close()
        return replace(_report_exit(processes, num_aborted), is_ray_lost=is_ray_lost)


def start(
    config: ClusterConfig,
    progress: Progress | None = None,
) -> Deployment:
    """Brings a deployment up; returns when its fronts accept requests.

    An exception, Ctrl-C included, leaves nothing running.

    Raises:
        PlacementError: the cluster has no room; names what is missing, per bundle.
        ConfigError, NotFound: the configuration cannot be.
        Unavailable: a process died, or Ray could not be started or joined.
    """
    tell = progress or (lambda process, stage, fraction: None)
    config = resolve_models(config, tell)
    if not config.ray.address:
        check_local_ports(config.front)
    session = _RaySession(config, tell)
    controller = None
    try:
        session.open()
        tell("controller", "start", 0.0)
        controller = _create_controller(config, is_local=session.is_local)
        addresses = _wait_started(controller, config, tell)
    except BaseException:
        if controller is not None:
            _shut_down(controller, session, 0.0, threading.Event())
        processes = session.processes()
        session.close()
        # Ray ends what it knows. Of a start that was broken off it knows nothing.
        _report_exit(processes, 0, _EXIT_S if session.is_open else 0.0)
        raise
    return Deployment(
        config=config,
        grpc_addresses=tuple(grpc_address for grpc_address, _ in addresses),
        http_addresses=tuple(http_address for _, http_address in addresses),
        _controller=controller,
        _session=session,
        log_dir=session.log_dir(),
    )


class _RaySession:
    """This process's connection to Ray, and Ray's own processes if it started them."""

    def __init__(self, config: ClusterConfig, tell: Progress) -> None:
        self._config = config
        self._tell = tell
        self._work_dir: Path | None = None
        self._core: Core | None = None  # of a local cluster
        self._is_ours = False  # whether `close` disconnects
        self.is_open = False  # whether Ray has all of its processes and this connection
        self.is_local = False  # whether `close` ends the cluster

    def open(self) -> None:
        """Raises: Unavailable: Ray cannot be started, or the cluster cannot be joined."""
        settings = self._config.ray
        if ray.is_initialized():
            self.is_open = True
            return  # inside somebody's driver or actor: theirs to close
        self._tell("ray", "start" if not settings.address else "join", 0.0)
        # Ray puts the driver's directory first on its workers' path. From a source tree that would
        # shadow other packages (`kernels`), so workers get an empty one.
        self._work_dir = Path(tempfile.mkdtemp(prefix="paceline-"))
        options: dict[str, Any] = {  # Any: Ray's keyword arguments
            "namespace": settings.namespace,
            "runtime_env": {"working_dir": str(self._work_dir)},
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        if settings.address:
            options["address"] = settings.address
        else:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
            if settings.num_cpus:
                options["num_cpus"] = settings.num_cpus
            # Ray reads it when it starts its processes; there is no argument for it.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._is_ours = True
        self.is_local = not settings.address
        try:
            with in_groups_of_their_own():
                ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            lines = str(error).strip().splitlines() or [repr(error)]
            if settings.address:
                raise Unavailable(
                    f"Ray cluster '{settings.address}' cannot be joined: {lines[0]}; if "
                    "`ray start --head` began it, set RAY_AUTH_MODE=token and have its "
                    "~/.ray/auth_token here"
                ) from error
            raise Unavailable(f"Ray cannot be started on this machine: {lines[0]}") from error
        self.is_open = True
        if self.is_local:
            self._core = Core()
        self._tell("ray", "ready", 1.0)

    def processes(self) -> list[Process]:
        """All processes of the local cluster; none of a joined one, which is not ours to judge."""
        if not self.is_local:
            return []
        return descendants()

    def log_dir(self) -> str:
        """Where the processes of this machine write their logs; of another, at the same place."""
        node = getattr(ray._private.worker, "_global_node", None)
        return str(node.get_logs_dir_path()) if node is not None else "Ray's session directory"

    def is_broken(self) -> bool:
        """Whether the local Ray lost a process without which calls into it block."""
        return self._core is not None and self._core.is_lost()

    def close(self) -> None:
        if self._is_ours and self.is_broken():
            abandon_ray()
        elif self._is_ours:
            ray.shutdown()
        if self._work_dir is not None:
            shutil.rmtree(self._work_dir, ignore_errors=True)


def _create_controller(config: ClusterConfig, *, is_local: bool) -> Any:  # Any: a Ray handle
    namespace = config.ray.namespace
    try:
        ray.get_actor(CONTROLLER_NAME, namespace)
    except ValueError:
        pass
    else:
        raise ConfigError(
            f"a deployment runs already in the Ray namespace '{namespace}'; stop it, or choose "
            "another namespace with ray.namespace"
        )
    return (
        ray.remote(Controller)
        .options(
            name=CONTROLLER_NAME,
            namespace=namespace,
            num_cpus=0,
            num_gpus=0,
            max_restarts=0,
            enable_task_events=False,
            runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
        )
        .remote(config, is_local=is_local)
    )


def _wait_started(
    controller: Any, config: ClusterConfig, tell: Progress
) -> Sequence[tuple[str, str]]:  # Any: a Ray handle
    started = controller.start.remote()
    # Progress may be slow to come: a rank that is not created yet cannot answer.
    progress = controller.progress.remote()
    shown: dict[str, tuple[str, float]] = {}
    while True:
        ready, _ = ray.wait([started], timeout=_POLL_S)
        if ready:
            addresses: Sequence[tuple[str, str]] = _get(started, 1.0)
            tell("controller", "ready", 1.0)
            return addresses
        ready, _ = ray.wait([progress], timeout=0)
        if not ready:
            continue
        for process, stage, fraction in _get(progress, 1.0):
            if shown.get(process) != (stage, fraction):
                shown[process] = (stage, fraction)
                tell(process, stage, fraction)
        progress = controller.progress.remote()


def _shut_down(
    controller: Any, session: _RaySession, drain_s: float, hurry: threading.Event
) -> int:  # Any: as above
    """Ends all that the controller started, then itself. Returns the number of aborted requests.

    Without a Ray it does nothing: what runs is ended with the session.
    """
    if session.is_broken():
        return 0
    num_aborted = 0
    ended = controller.shutdown.remote(drain_s)
    give_up_s = time.monotonic() + drain_s + _STOP_MARGIN_S
    was_hurried = False
    while time.monotonic() < give_up_s and not session.is_broken():
        try:
            ready, _ = ray.wait([ended], timeout=_POLL_S)
            if ready:
                num_aborted = int(_get(ended, 1.0))
                break
        except (PacelineError, ray.exceptions.RayError) as error:
            log.warning("controller did not end by itself: %s", error)
            # Perhaps somebody ends all processes, and Ray's own end a moment later.
            notice_s = time.monotonic() + _NOTICE_S
            while time.monotonic() < notice_s and not session.is_broken():
                time.sleep(0.05)
            break
        if hurry.is_set() and not was_hurried:
            was_hurried = True
            give_up_s = min(give_up_s, time.monotonic() + 1.0)
    if not session.is_broken():
        # What it created belongs to it and ends with it.
        ray.kill(controller)
    return num_aborted


def _report_exit(
    processes: list[Process], num_aborted: int, grace_s: float = _EXIT_S
) -> StopReport:
    """Waits for processes to be gone and ends those that are not."""
    give_up_s = time.monotonic() + grace_s
    alive = [process for process in processes if process.is_alive]
    while alive and time.monotonic() < give_up_s:
        time.sleep(0.05)
        alive = [process for process in alive if process.is_alive]
    for process in alive:
        if grace_s:
            log.warning("process outlived its deployment and is killed pid=%d", process.pid)
        process.kill()
    if alive:
        time.sleep(0.2)
    leftover = tuple(process.pid for process in alive if process.is_alive)
    return StopReport(num_aborted, len(processes) - len(leftover), leftover)


def _get(ref: Any, timeout_s: float) -> Any:  # Any: what the actor's method returns
    """Raises: the PacelineError that an actor's method ended with, or Unavailable."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise unwrap(error, "the controller") from None
    except ray.exceptions.GetTimeoutError as error:
        raise Unavailable(f"the controller did not answer within {timeout_s:g} s") from error
    except ray.exceptions.RayError as error:
        raise Unavailable(f"the controller died: {brief(error)}") from None
