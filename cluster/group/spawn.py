"""Starts a group's ranks as Ray actors in its placement group, watches them, and ends them.

The only place that knows both the rank classes and Ray's options for them.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.cluster.controller.events import Role
from paceline.cluster.group.draft_leader import DraftLeader
from paceline.cluster.group.leader import GroupLeader, LeaderInfo
from paceline.cluster.group.rank import GroupRank
from paceline.cluster.group.settings import RankSettings
from paceline.cluster.naming import placement_group_name, rank_name
from paceline.cluster.placement.bundles import GroupPlan, GroupRequest, Resources
from paceline.cluster.placement.groups import create_placement_group
from paceline.worker.entry import RANK_ENV
from paceline.worker.errors import InternalError, PacelineError, Unavailable

log = logging.getLogger(__name__)

_SETTLE_S = 2.0  # how long the other ranks may take to say why they failed
_STOP_S = 15.0

ActorHandle = Any  # Any: Ray's handles have their methods at run time only


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group as the controller wants it; `settings` are those of rank 0."""

    role: Role
    settings: RankSettings
    per_rank: Resources

    @property
    def group_id(self) -> str:
        return self.settings.group_id

    @property
    def request(self) -> GroupRequest:
        flag = "--tensor-parallel-size"
        if self.role == "draft":
            flag = "draft_tensor_parallel_size"
        return GroupRequest(self.group_id, self.settings.tp_size, self.per_rank, flag)


class RunningGroup:
    """The actors and the placement group of one group, from `spawn_group` to `stop`."""

    def __init__(self, spec: GroupSpec, placement: PlacementGroup) -> None:
        self.spec = spec
        self.info: LeaderInfo | None = None
        self._placement = placement
        self._actors: list[ActorHandle] = []
        self._runs: list[asyncio.Future[None]] = []

    @property
    def leader(self) -> ActorHandle:
        return self._actors[0]

    def create_actors(self, num_threads: Sequence[int]) -> None:
        for tp_rank in range(self.spec.settings.tp_size):
            self._actors.append(self._create_actor(tp_rank, num_threads[tp_rank]))

    async def build(self) -> LeaderInfo:
        """Raises: the error of the rank that failed, with its reason."""
        rendezvous = await call_actor(self.leader.reserve.remote(), self._what(0))
        builds = [
            asyncio.ensure_future(call_actor(actor.build.remote(rendezvous), self._what(i)))
            for i, actor in enumerate(self._actors)
        ]
        try:
            results = await asyncio.gather(*builds)
        except PacelineError:
            # A rank that fails takes the others with it; the first to say so may not be the cause.
            await asyncio.wait(builds, timeout=_SETTLE_S)
            raise _root_cause(builds) from None
        finally:
            for build in builds:
                build.cancel()
        self.info = results[0]
        assert self.info is not None
        self._runs = [
            asyncio.ensure_future(call_actor(actor.run.remote(), self._what(i)))
            for i, actor in enumerate(self._actors)
        ]
        return self.info

    async def progress(self) -> list[tuple[str, float]]:
        """Stage and fraction of each rank that answers."""
        refs = [actor.progress.remote() for actor in self._actors]
        answers = await asyncio.gather(
            *(call_actor(ref, "") for ref in refs), return_exceptions=True
        )
        return [a if not isinstance(a, BaseException) else ("lost", 0.0) for a in answers]

    async def pids(self) -> list[int]:
        answers = await asyncio.gather(
            *(call_actor(actor.pid.remote(), "") for actor in self._actors), return_exceptions=True
        )
        return [a for a in answers if isinstance(a, int)]

    async def wait_until_over(self) -> PacelineError | None:
        """Returns when a rank ends, with the reason when it did so by itself."""
        await asyncio.wait(self._runs, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(self._runs, timeout=0.2)
        if all(run.done() and run.exception() is None for run in self._runs):
            return None
        return _root_cause(self._runs)

    async def stop(self, *, is_graceful: bool) -> None:
        """Ends all ranks and gives the placement back; safe to repeat."""
        if is_graceful and self.info is not None:
            try:
                await asyncio.wait_for(call_actor(self.leader.stop.remote(), ""), _STOP_S)
                await asyncio.wait(self._runs, timeout=_SETTLE_S)
            except (TimeoutError, PacelineError) as error:
                log.warning("group did not stop by itself group=%s: %s", self.spec.group_id, error)
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        remove_placement_group(self._placement)

    def _create_actor(self, tp_rank: int, num_threads: int) -> ActorHandle:
        if tp_rank > 0:
            cls: type = GroupRank
        else:
            cls = GroupLeader if self.spec.role == "target" else DraftLeader
        # Read when torch is loaded.
        env = {**RANK_ENV, "OMP_NUM_THREADS": str(num_threads)}
        if not self.spec.per_rank.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""  # Ray no longer hides GPUs from those that own none
        settings = replace(self.spec.settings, tp_rank=tp_rank, num_threads=num_threads)
        resources = self.spec.per_rank.as_ray()
        return create_actor(
            ray.remote(cls).options(
                name=rank_name(self.spec.group_id, tp_rank),
                namespace=settings.namespace,
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                enable_task_events=False,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement, placement_group_bundle_index=tp_rank
                ),
            ),
            settings,
        )

    def _what(self, tp_rank: int) -> str:
        return f"rank {tp_rank} of group {self.spec.group_id}"


async def spawn_group(
    spec: GroupSpec, plan: GroupPlan, num_threads: Sequence[int], timeout_s: float
) -> RunningGroup:
    """Reserves the bundles and creates the ranks; `build` them next.

    Args:
        num_threads: of each rank.
    Raises: PlacementError: not placed within `timeout_s`.
    """
    placement = await create_placement_group(plan, placement_group_name(spec.group_id), timeout_s)
    group = RunningGroup(spec, placement)
    try:
        group.create_actors(num_threads)
    except BaseException:
        await group.stop(is_graceful=False)
        raise
    return group


def create_actor(actor_class: Any, *args: Any) -> ActorHandle:  # Any: Ray's, and its arguments
    """Raises: Unavailable: the name is still that of an actor that is being removed."""
    try:
        return actor_class.remote(*args)
    except ValueError as error:
        raise Unavailable(f"Ray did not create an actor: {error}") from error


async def call_actor(ref: Any, what: str) -> Any:  # Any: what the actor's method returns
    """Awaits an actor call. Raises: the PacelineError it ended with."""
    try:
        return await ref
    except ray.exceptions.RayTaskError as error:
        raise unwrap(error, what) from None
    except ray.exceptions.RayError as error:
        raise Unavailable(f"{what} died: {brief(error)}") from None


def brief(error: ray.exceptions.RayError) -> str:
    """Ray's own errors are pages long: the first line, and the cause if a traceback is inside."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [repr(error)]
    return lines[0] if "Traceback" not in str(error) else f"{lines[0]} … {lines[-1]}"


def unwrap(error: ray.exceptions.RayTaskError, what: str) -> PacelineError:
    """The error that a method of an actor raised, without Ray's traceback around it."""
    cause = error.cause
    if isinstance(cause, PacelineError):
        return cause
    return InternalError(f"{what} failed: {type(cause).__name__}: {cause}")


def _root_cause(futures: Sequence["asyncio.Future[Any]"]) -> PacelineError:
    errors = [
        error
        for future in futures
        if future.done() and not future.cancelled()
        if isinstance(error := future.exception(), PacelineError)
    ]
    # A lost peer is what the others report; what is wrong with a rank it says itself.
    errors.sort(key=lambda error: isinstance(error, Unavailable))
    return errors[0] if errors else Unavailable("a rank ended without a reason")
