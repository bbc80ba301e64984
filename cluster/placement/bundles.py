"""Groups x nodes -> placement bundles, or the reason why one of them fits nowhere. Pure.

A group is one bundle per rank. It goes onto one node where it can, because its ranks talk at every
layer, and otherwise onto as few as possible. Ray places; this says what to ask it for, and what
to tell a person whom it keeps waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Strategy = Literal["STRICT_PACK", "PACK"]

_MAX_LISTED = 4  # bundles of one group named one by one; the rest are counted
_EPSILON = 1e-6  # Ray counts in 1/10000


@dataclass(frozen=True, slots=True)
class Resources:
    cpus: float = 0.0
    gpus: float = 0.0

    def holds(self, asked: "Resources") -> bool:
        return asked.cpus <= self.cpus + _EPSILON and asked.gpus <= self.gpus + _EPSILON

    def minus(self, asked: "Resources") -> "Resources":
        return Resources(self.cpus - asked.cpus, self.gpus - asked.gpus)

    def times(self, count: int) -> "Resources":
        return Resources(self.cpus * count, self.gpus * count)

    def num_fitting(self, asked: "Resources") -> int:
        """How many of `asked` fit; a large number when it asks for nothing."""
        pairs = ((self.cpus, asked.cpus), (self.gpus, asked.gpus))
        return int(min([(has + _EPSILON) / want for has, want in pairs if want > 0], default=1e9))

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value:g}"
            for name, value in (("CPU", self.cpus), ("GPU", self.gpus))
            if value or name == "CPU"
        )

    def as_ray(self) -> dict[str, float]:
        """A Ray bundle, which must ask for something; a little of a CPU stands for nothing."""
        asked = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: value for name, value in asked.items() if value > 0} or {"CPU": 0.001}


@dataclass(frozen=True, slots=True)
class NodeView:
    node_id: str
    address: str
    total: Resources
    free: Resources


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """What a group asks for; `flag` is the setting that a person would lower."""

    group_id: str
    num_ranks: int
    per_rank: Resources
    flag: str = "--tensor-parallel-size"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    group_id: str
    strategy: Strategy
    bundles: tuple[Resources, ...]  # by rank
    node_ids: tuple[str, ...]  # where they would go as things are; Ray decides


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A group that does not fit beside those before it."""

    request: GroupRequest
    num_placed: int  # ranks that do fit
    left: tuple[tuple[NodeView, Resources], ...]  # what each node has left for the next rank

    @property
    def others_hold_some(self) -> bool:
        """Whether something that is not of this start takes resources."""
        return any(not node.free.holds(node.total) for node, _ in self.left)


@dataclass(frozen=True, slots=True)
class Placement:
    plans: tuple[GroupPlan, ...]
    shortfalls: tuple[Shortfall, ...]


def plan_groups(requests: Sequence[GroupRequest], nodes: Sequence[NodeView]) -> Placement:
    """Places groups in order, each beside those before it; what does not fit takes nothing."""
    left = {node.node_id: node.free for node in nodes}
    plans: list[GroupPlan] = []
    shortfalls: list[Shortfall] = []
    for request in requests:
        node_ids = _on_one_node(request, left) or _on_few_nodes(request, left)
        after = dict(left)
        for node_id in node_ids:
            after[node_id] = after[node_id].minus(request.per_rank)
        if len(node_ids) < request.num_ranks:
            rest = tuple((node, after[node.node_id]) for node in nodes)
            shortfalls.append(Shortfall(request, len(node_ids), rest))
            continue
        left = after
        plans.append(
            GroupPlan(
                request.group_id,
                "STRICT_PACK" if len(set(node_ids)) == 1 else "PACK",
                (request.per_rank,) * request.num_ranks,
                tuple(node_ids),
            )
        )
    return Placement(tuple(plans), tuple(shortfalls))


def could_ever_fit(requests: Sequence[GroupRequest], nodes: Sequence[NodeView]) -> bool:
    """Whether all groups would fit together if nothing else ran on these nodes."""
    empty = [replace(node, free=node.total) for node in nodes]
    return not plan_groups(requests, empty).shortfalls


def explain(shortfalls: Sequence[Shortfall]) -> str:
    """One paragraph per group: bundles that fit nowhere, what each node has, and the way out."""
    return "\n".join(_explain_one(shortfall) for shortfall in shortfalls)


def _explain_one(shortfall: Shortfall) -> str:
    request, asked = shortfall.request, shortfall.request.per_rank
    lines = [
        f"group {request.group_id}: {request.num_ranks} ranks asked, "
        f"{shortfall.num_placed} can be placed"
    ]
    first_out = shortfall.num_placed
    lines += [
        f"  bundle {rank} asks {asked}: fits on no node"
        for rank in range(first_out, min(first_out + _MAX_LISTED, request.num_ranks))
    ]
    num_more = request.num_ranks - first_out - _MAX_LISTED
    if num_more > 0:
        lines.append(f"  bundles {first_out + _MAX_LISTED}..{request.num_ranks - 1}: the same")
    if not shortfall.left:
        lines.append("  the cluster has no live node")
    for node, left in shortfall.left:
        lines.append(
            f"  node {node.address}: {_lack(asked, left)} "
            f"(left {left}; free before this start {node.free}; in all {node.total})"
        )
    lines.append(f"  fix: {_fix(shortfall)}")
    return "\n".join(lines)


def _lack(asked: Resources, left: Resources) -> str:
    lacks = []
    if asked.gpus > left.gpus + _EPSILON:
        lacks.append(f"lacks GPU {asked.gpus - left.gpus:g}")
    if asked.cpus > left.cpus + _EPSILON:
        lacks.append(f"lacks CPU {asked.cpus - left.cpus:g}")
    return " and ".join(lacks) or "is full"


def _fix(shortfall: Shortfall) -> str:
    request, asked = shortfall.request, shortfall.request.per_rank
    ways = []
    if shortfall.num_placed:
        ways.append(f"lower {request.flag} to {shortfall.num_placed}")
    if shortfall.others_hold_some:
        ways.append("stop what holds the other resources")
    if asked.cpus and not asked.gpus:
        num_cpus = sum(node.total.cpus for node, _ in shortfall.left)
        per_rank = num_cpus / request.num_ranks
        ways.append(f"lower --num-cpus-per-rank to {per_rank:.3g} or less")
    missing = asked.times(request.num_ranks - shortfall.num_placed)
    ways.append(f"add nodes with {missing} to the Ray cluster")
    return ", or ".join(ways)


def _on_one_node(request: GroupRequest, left: dict[str, Resources]) -> list[str]:
    """The fullest node that still holds the whole group, so that large holes stay whole."""
    asked = request.per_rank.times(request.num_ranks)
    fitting = [node_id for node_id, free in left.items() if free.holds(asked)]
    if not fitting:
        return []
    best = min(fitting, key=lambda node_id: (left[node_id].gpus, left[node_id].cpus, node_id))
    return [best] * request.num_ranks


def _on_few_nodes(request: GroupRequest, left: dict[str, Resources]) -> list[str]:
    """As many ranks as fit, the roomiest node first."""
    room = {node_id: free.num_fitting(request.per_rank) for node_id, free in left.items()}
    node_ids: list[str] = []
    for node_id in sorted(room, key=lambda node_id: (-room[node_id], node_id)):
        node_ids += [node_id] * min(room[node_id], request.num_ranks - len(node_ids))
    return node_ids
