"""GroupSupervisor and FrontSupervisor: keep one group, or one front, running.

Each is a loop: start, say so, wait for its death, clear up, start again after a pause that grows
while it keeps dying. A first start that fails is reported and not repeated: the deployment is
wrong, not unlucky. What follows from a start or a death is the state's to decide.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.cluster.controller.events import Event, GroupDied, GroupReady, GroupStarting
from paceline.cluster.front.actor import FrontActor, FrontSpec
from paceline.cluster.group.spawn import (
    GroupSpec,
    RunningGroup,
    call_actor,
    create_actor,
    spawn_group,
)
from paceline.cluster.naming import front_name
from paceline.cluster.placement.bundles import GroupPlan, NodeView
from paceline.cluster.placement.groups import view_nodes, wait_for_room
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.errors import InternalError, PacelineError, Unavailable

if TYPE_CHECKING:
    from paceline.cluster.group.leader import LeaderInfo

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 30.0
_STABLE_S = 60.0  # a life this long makes the next pause short again


class Pauses:
    """How long to wait before each new start: doubled by every short life.

    `attempt` is the number of the start that comes next; a long life is followed by the second.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._next_s = _FIRST_PAUSE_S
        self._began_s = clock.monotonic()
        self.attempt = 1

    def begin(self) -> None:
        self._began_s = self._clock.monotonic()

    def next_s(self) -> float:
        if self._clock.monotonic() - self._began_s >= _STABLE_S:
            self._next_s, self.attempt = _FIRST_PAUSE_S, 1
        self.attempt += 1
        pause_s = self._next_s
        self._next_s = min(2 * self._next_s, _MAX_PAUSE_S)
        return pause_s


def _ended(what: str, reason: object, pauses: Pauses, pause_s: float, *, was_up: bool) -> str:
    verb = "died" if was_up else "did not start"
    return (
        f"{what} {verb}: {str(reason).rstrip('.')}; starting it again in {pause_s:g} s "
        f"(attempt {pauses.attempt})"
    )


def _is_back(what: str, down_s: float) -> str:
    return f"{what} is ready again after {down_s:.0f} s"


class GroupSupervisor:
    """
    Args:
        emit: takes the events of this group's life.
        say: told in a line of every death and of every return; of the first start only `emit` is.
        plan: where it goes on its first start; later ones look at the cluster as it is then.
    """

    def __init__(
        self,
        spec: GroupSpec,
        plan: GroupPlan,
        *,
        emit: Callable[[Event], None],
        say: Callable[[str], None],
        threads_per_rank: int,
        placement_timeout_s: float,
        start_timeout_s: float,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.first_start: asyncio.Future[LeaderInfo] = asyncio.get_running_loop().create_future()
        self._plan: GroupPlan | None = plan
        self._emit = emit
        self._say = say
        self._threads_per_rank = threads_per_rank
        self._placement_timeout_s = placement_timeout_s
        self._start_timeout_s = start_timeout_s
        self._clock = clock or SystemClock()
        self._group: RunningGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def start(self) -> None:
        """Runs until the first start fails or `stop` is called; see `first_start`."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(
            lambda task: _note_end(task, self.spec.group_id, self.first_start)
        )

    async def _run(self) -> None:
        pauses = Pauses(self._clock)
        died_s: float | None = None
        while not self._is_stopping:
            group_id = self.spec.group_id
            self._emit(GroupStarting(group_id, self.spec.role, self.spec.settings.tp_size))
            reason: object
            was_up = False
            try:
                group = await self._start()
            except PacelineError as error:
                reason = error
                self._emit(GroupDied(group_id, str(error), was_starting=True))
                if not self.first_start.done():
                    self.first_start.set_exception(error)
                    return
                log.error("group did not start again group=%s: %s", group_id, error)
            else:
                pauses.begin()
                if died_s is not None:
                    self._say(_is_back(group_id, self._clock.monotonic() - died_s))
                was_up = True
                reason = await group.wait_until_over() or "it was stopped from outside"
                died_s = self._clock.monotonic()
                self._emit(GroupDied(group_id, str(reason)))
                await self._clear(is_graceful=False)
                if not self._is_stopping:
                    log.error("group died group=%s: %s", group_id, reason)
            if not self._is_stopping:
                pause_s = pauses.next_s()
                self._say(_ended(group_id, reason, pauses, pause_s, was_up=was_up))
                await asyncio.sleep(pause_s)

    async def drain(self, timeout_s: float) -> int:
        """Of the leader, if it lives; how many reqs were aborted at the limit."""
        if self._group is None or self._group.info is None:
            return 0
        try:
            return int(await call_actor(self._group.leader.drain.remote(timeout_s), "leader"))
        except PacelineError as error:
            log.warning("group did not drain group=%s: %s", self.spec.group_id, error)
            return 0

    async def stop(self) -> None:
        """Ends the group for good: gracefully if it runs, at once if it is only starting."""
        self._is_stopping = True
        if self._group is not None and self._group.info is not None:
            await self._clear(is_graceful=True)
        await _end(self._task)
        _retrieve(self.first_start)

    async def progress(self) -> list[tuple[str, str, float]]:
        """(process, stage, fraction) of each rank."""
        group, group_id = self._group, self.spec.group_id
        if group is None:
            return [(group_id, "placement", 0.0)]
        ranks = await group.progress()
        if len(ranks) == 1:
            return [(group_id, *ranks[0])]
        return [(f"{group_id} rank {i}", *rank) for i, rank in enumerate(ranks)]

    async def pids(self) -> list[int]:
        return await self._group.pids() if self._group is not None else []

    async def _start(self) -> RunningGroup:
        plan, self._plan = self._plan, None
        if plan is None:
            placement = await wait_for_room(
                [self.spec.request], self._placement_timeout_s, can_grow=True
            )
            (plan,) = placement.plans
        self._group = await spawn_group(
            self.spec,
            plan,
            num_threads(plan, view_nodes(), self._threads_per_rank),
            self._placement_timeout_s,
        )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                info = await self._group.build()
        except TimeoutError:
            stages = await self.progress()
            await self._clear(is_graceful=False)
            where = "; ".join(f"{who} is at '{stage}'" for who, stage, _ in stages)
            raise Unavailable(
                f"group {self.spec.group_id} was not ready after {self._start_timeout_s:g} s: "
                f"{where}; raise ray.start_timeout_s if the model is only slow to load"
            ) from None
        except BaseException:
            await self._clear(is_graceful=False)
            raise
        self._emit(GroupReady(self.spec.group_id, info.address, info.num_pages))
        if not self.first_start.done():
            self.first_start.set_result(info)
        return self._group

    async def _clear(self, *, is_graceful: bool) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.stop(is_graceful=is_graceful)


def num_threads(plan: GroupPlan, nodes: list[NodeView], threads_per_rank: int) -> list[int]:
    """Threads of each rank: as configured, or its share of its node's CPUs.

    Groups do not share: a draft and its target take turns, and whole machines are rarely split
    between copies.
    """
    if threads_per_rank:
        return [threads_per_rank] * len(plan.bundles)
    cpus = {node.node_id: int(node.total.cpus) for node in nodes}
    return [
        max(1, cpus.get(node_id, 1) // plan.node_ids.count(node_id)) for node_id in plan.node_ids
    ]


class FrontSupervisor:
    """
    Args:
        say: told in a line of every death and of every return.
    """

    def __init__(
        self,
        spec: FrontSpec,
        *,
        node_id: str,
        say: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self.addresses: tuple[str, str] | None = None  # gRPC, HTTP; None while it is down
        self.first_start: asyncio.Future[tuple[str, str]] = (
            asyncio.get_running_loop().create_future()
        )
        self._spec = spec
        self._node_id = node_id
        self._say = say
        self._clock = clock or SystemClock()
        self._actor: Any = None  # Any: Ray's handles have their methods at run time only
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def name(self) -> str:
        return f"front-{self._spec.index}"

    def start(self) -> None:
        """Runs until the first start fails or `stop` is called; see `first_start`."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: _note_end(task, self.name, self.first_start))

    async def _run(self) -> None:
        pauses = Pauses(self._clock)
        died_s: float | None = None
        while not self._is_stopping:
            reason: object
            was_up = False
            try:
                self.addresses = await self._start()
            except PacelineError as error:
                reason = error
                self._kill()
                if not self.first_start.done():
                    self.first_start.set_exception(error)
                    return
                log.error("front did not start again front=%s: %s", self.name, error)
            else:
                pauses.begin()
                self._keep_ports(self.addresses)
                if not self.first_start.done():
                    self.first_start.set_result(self.addresses)
                if died_s is not None:
                    self._say(_is_back(self.name, self._clock.monotonic() - died_s))
                was_up = True
                reason = await self._watch()
                died_s = self._clock.monotonic()
            self.addresses = None
            if not self._is_stopping:
                pause_s = pauses.next_s()
                self._say(_ended(self.name, reason, pauses, pause_s, was_up=was_up))
                await asyncio.sleep(pause_s)

    async def stop(self, grace_s: float) -> int:
        """Lets its requests end for `grace_s`; how many were aborted."""
        self._is_stopping = True
        num_aborted = 0
        if self.addresses is not None:
            try:
                num_aborted = int(await self._call(self._actor.stop.remote(grace_s)))
            except PacelineError as error:
                log.warning("front did not drain front=%s: %s", self.name, error)
        await _end(self._task)
        self._kill()
        _retrieve(self.first_start)
        return num_aborted

    async def pids(self) -> list[int]:
        if self._actor is None:
            return []
        try:
            return [int(await self._call(self._actor.pid.remote()))]
        except PacelineError:
            return []

    async def _start(self) -> tuple[str, str]:
        self._actor = create_actor(
            ray.remote(FrontActor).options(
                name=front_name(self._spec.index),
                namespace=self._spec.namespace,
                num_cpus=0,
                num_gpus=0,
                max_restarts=0,
                enable_task_events=False,
                runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": ""}},
                # Where the controller is, which is where a person looks for it; elsewhere if that
                # node is gone.
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node_id, soft=True),
            ),
            self._spec,
        )
        grpc_address, http_address = await self._call(self._actor.start.remote())
        return str(grpc_address), str(http_address)

    async def _watch(self) -> object:
        """Why it ended."""
        reason: object = "it was stopped from outside"
        try:
            await self._call(self._actor.run.remote())
        except PacelineError as error:
            reason = error
            if not self._is_stopping:
                log.error("front died front=%s: %s", self.name, error)
        if not self._is_stopping:
            self._kill()
        return reason

    def _keep_ports(self, addresses: tuple[str, str]) -> None:
        """A front that starts again is found where it was."""
        grpc_port, http_port = (int(address.rpartition(":")[2]) for address in addresses)
        self._spec = replace(self._spec, grpc_port=grpc_port, port=http_port)

    def _kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
            self._actor = None

    def _call(self, ref: Any) -> Awaitable[Any]:  # Any: what the actor's method returns
        return call_actor(ref, self.name)


def _note_end(
    task: "asyncio.Task[None]", what: str, first_start: "asyncio.Future[Any]"
) -> None:  # Any: whatever the start would have brought
    """A supervisor that fails by a defect of ours must not leave its starter waiting."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    log.error("supervisor failed what=%s", what, exc_info=error)
    if not first_start.done():
        first_start.set_exception(InternalError(f"{what} could not be started: {error!r}"))


async def _end(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _retrieve(future: "asyncio.Future[Any]") -> None:  # Any: whatever it would have brought
    """Nobody waits for it any more, so what it failed with is no news."""
    if future.done() and not future.cancelled():
        future.exception()
    else:
        future.cancel()
