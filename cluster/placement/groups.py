"""One named Ray placement group per group: asked for, waited for within a limit, and given back.

A wait that fails says of each bundle what it asked and what each node has; nothing is left behind.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from paceline.cluster.placement.bundles import (
    GroupPlan,
    GroupRequest,
    NodeView,
    Placement,
    Resources,
    could_ever_fit,
    explain,
    plan_groups,
)
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.errors import ConfigError

log = logging.getLogger(__name__)

_POLL_S = 0.25


class PlacementError(ConfigError):
    """What was asked for does not fit the cluster; the message says what is missing, per bundle."""


def view_nodes() -> list[NodeView]:
    """The live nodes, with what they have and what of it is free."""
    # Ray's own launchers use this too; there is no public call that splits by node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeView(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=_resources(node["Resources"]),
            # A node that has just joined has reported nothing yet: all of it is free.
            free=_resources(free.get(node["NodeID"], node["Resources"])),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


async def wait_for_room(
    requests: Sequence[GroupRequest],
    timeout_s: float,
    *,
    can_grow: bool,
    progress: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> Placement:
    """Returns a plan for all groups as soon as the cluster has room for every one of them.

    Args:
        can_grow: whether nodes may still join; if not, what fits nowhere is refused at once.
        progress: told in words what is missing, while it waits.
    Raises: PlacementError: no room within `timeout_s`.
    """
    clock = clock or SystemClock()
    deadline_s = clock.monotonic() + timeout_s
    while True:
        nodes = view_nodes()
        placement = plan_groups(requests, nodes)
        if not placement.shortfalls:
            return placement
        is_hopeless = not can_grow and not could_ever_fit(requests, nodes)
        if is_hopeless or clock.monotonic() >= deadline_s:
            waited = "" if is_hopeless else f" within {timeout_s:g} s"
            raise PlacementError(
                f"the Ray cluster has no room{waited}:\n{explain(placement.shortfalls)}"
            )
        if progress is not None:
            progress(_say_missing(placement))
        await asyncio.sleep(_POLL_S)


async def create_placement_group(plan: GroupPlan, name: str, timeout_s: float) -> PlacementGroup:
    """Reserves a group's bundles. `name` is unique in the Ray namespace.

    Raises: PlacementError: not placed within `timeout_s`; the reservation is withdrawn.
    """
    group: PlacementGroup = placement_group(
        [bundle.as_ray() for bundle in plan.bundles], strategy=plan.strategy, name=name
    )
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        request = GroupRequest(plan.group_id, len(plan.bundles), plan.bundles[0])
        reasons = explain(plan_groups([request], view_nodes()).shortfalls)
        raise PlacementError(
            f"Ray did not place group {plan.group_id} within {timeout_s:g} s:\n"
            + (reasons or "  room was there, but other work took it first; try again")
        ) from None
    except BaseException:
        remove_placement_group(group)
        raise
    log.info(
        "placed group=%s strategy=%s ranks=%d", plan.group_id, plan.strategy, len(plan.bundles)
    )
    return group


def _resources(amounts: dict[str, float]) -> Resources:
    return Resources(amounts.get("CPU", 0.0), amounts.get("GPU", 0.0))


def _say_missing(placement: Placement) -> str:
    parts = [
        f"{short.request.group_id}: {short.num_placed}/{short.request.num_ranks} ranks fit"
        for short in placement.shortfalls
    ]
    return "waiting for room; " + ", ".join(parts)
