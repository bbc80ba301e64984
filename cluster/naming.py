"""Names of a deployment's Ray actors and placement groups; how its processes find each other."""

import asyncio
from collections.abc import Awaitable, Callable

import ray

from paceline.cluster.config import CONTROLLER_NAME
from paceline.worker.errors import Unavailable


def rank_name(group_id: str, tp_rank: int) -> str:
    return f"paceline-{group_id}-rank-{tp_rank}"


def placement_group_name(group_id: str) -> str:
    return f"paceline-{group_id}"


def front_name(index: int) -> str:
    return f"paceline-front-{index}"


def controller_resolver(namespace: str) -> Callable[[], Awaitable[str]]:
    """Answers host:port of the controller's listener now; raises Unavailable when there is none."""

    async def resolve() -> str:
        return await asyncio.to_thread(find_controller, namespace)

    return resolve


def find_controller(namespace: str, timeout_s: float = 5.0) -> str:
    """Raises: Unavailable: no controller of that name answers."""
    try:
        controller = ray.get_actor(CONTROLLER_NAME, namespace)
        return str(ray.get(controller.address.remote(), timeout=timeout_s))
    except (ValueError, ray.exceptions.RayError) as error:
        raise Unavailable(
            f"no controller runs in the Ray namespace '{namespace}': {str(error).splitlines()[0]}"
        ) from error
