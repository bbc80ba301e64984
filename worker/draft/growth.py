"""Growth: from the logits behind a root to a tree of guesses, level by level over a whole batch.

With one branch per level a tree is a chain: its tokens are chosen as the target will choose them,
with the req's parameters and the noise of its seed and position, and their KV lies in line, so
what the target accepts need not be computed again. With more branches the best `topk` nodes of a
level are computed and their best children compete for the next, as in EAGLE-2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.worker.config import SpecConfig
from paceline.worker.draft.reqs import DraftReq, ReqKey
from paceline.worker.draft.step_runner import StepRunner
from paceline.worker.sampler import LogitRow, Sampler
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Phase


@dataclass(slots=True)
class Lane:
    """One req whose tree grows: `depth` levels wanted, `num_nodes` nodes without the root."""

    req: DraftReq
    depth: int
    num_nodes: int
    logits: Tensor  # [1, V] behind the root
    path: list[int] = field(default_factory=list)


def num_growth_slots(spec: SpecConfig, depth: int) -> int:
    """Slots that growth writes behind a root; the last level is not computed."""
    return spec.topk * (depth - 1)


def grow_chains(
    lanes: Sequence[Lane], sampler: Sampler, runner: StepRunner
) -> dict[ReqKey, DraftTree]:
    """A chain for each lane, one forward per level after the first."""
    growing = _with_logits(lanes)
    while growing:
        logits = torch.cat([lane.logits for lane in growing])  # [n, V]
        rows = [LogitRow(lane.req.params, lane.req.ids, (), tuple(lane.path)) for lane in growing]
        for lane, token in zip(growing, sampler.choose(logits, rows).tolist(), strict=True):
            lane.path.append(token)
        growing = [lane for lane in growing if len(lane.path) < lane.depth]
        if growing:
            _advance_chains(growing, runner)
            growing = _with_logits(growing)
    return {lane.req.key: DraftTree.chain(lane.path) for lane in lanes}


def _advance_chains(lanes: Sequence[Lane], runner: StepRunner) -> None:
    rows = [
        runner.make_row(
            lane.req, Phase.DECODE, len(lane.req.ids) + len(lane.path) - 1, (lane.path[-1],)
        )
        for lane in lanes
    ]
    for lane, logits in zip(lanes, runner.forward(rows), strict=True):
        lane.req.guessed_ids = list(lane.path)
        lane.logits = logits


def _with_logits(lanes: Sequence[Lane]) -> list[Lane]:
    """Those whose logits are numbers: a draft that computed NaN guesses nothing further."""
    return [lane for lane in lanes if bool(torch.isfinite(lane.logits.max()))]
