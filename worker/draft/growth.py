"""Growth: from the logits behind each root to trees of guesses, level by level over a whole batch.

With one branch a tree is a chain: its tokens are chosen as the target will choose them, with the
req's parameters and the noise of its seed and position, and their KV lies in line, so what the
target accepts need not be computed again. With more branches the best `topk` nodes of a level
are computed and their best children compete for the next (`worker/spec/selection.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.worker.draft.reqs import DraftReq, ReqKey
from paceline.worker.draft.step_runner import StepRunner
from paceline.worker.sampler import LogitRow, Sampler
from paceline.worker.spec.selection import Candidates, Selection, build_trees, select_top_k_tokens
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Phase


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tree to grow for a req: levels below the root, branches, nodes with the root."""

    req: DraftReq
    depth: int
    topk: int
    num_nodes: int

    @property
    def num_slots(self) -> int:
        """Slots that growth writes behind the root; the last level is not computed."""
        return self.topk * (self.depth - 1)


@dataclass(frozen=True, slots=True)
class Sprout:
    """A req that has caught up."""

    want: Wanted
    logits: Tensor  # [1, V] behind the root


def grow(
    sprouts: Sequence[Sprout], sampler: Sampler, runner: StepRunner
) -> dict[ReqKey, DraftTree]:
    """A tree of each req; one forward for each level after the first, and for each topk."""
    finite = _are_finite([sprout.logits for sprout in sprouts])
    sound = [sprout for sprout, is_finite in zip(sprouts, finite, strict=True) if is_finite]
    chains = [_Chain(s.want, s.logits) for s in sound if s.want.topk == 1]
    trees = _grow_chains(chains, sampler, runner)
    for topk in {s.want.topk for s in sound} - {1}:
        bushes = [_Bush(s.want, s.logits, [()] * topk) for s in sound if s.want.topk == topk]
        trees |= _grow_bushes(bushes, topk, sampler, runner)
    return trees


def _are_finite(logits: Sequence[Tensor]) -> list[bool]:
    """Whether each [1, V] has a finite maximum: a draft that computed NaN guesses no further."""
    if not logits:
        return []
    finite: list[bool] = torch.cat(list(logits)).amax(-1).isfinite().tolist()
    return finite


# ---- one branch


@dataclass(slots=True)
class _Chain:
    want: Wanted
    logits: Tensor  # [1, V] behind the last token
    path: list[int] = field(default_factory=list)

    @property
    def is_grown(self) -> bool:
        return len(self.path) == self.want.depth


def _grow_chains(
    chains: Sequence[_Chain], sampler: Sampler, runner: StepRunner
) -> dict[ReqKey, DraftTree]:
    growing = list(chains)
    while growing:
        rows = [_logit_row(chain.want.req, tuple(chain.path)) for chain in growing]
        logits = torch.cat([chain.logits for chain in growing])  # [n, V]
        for chain, token in zip(growing, sampler.choose(logits, rows).tolist(), strict=True):
            chain.path.append(token)
        growing = [chain for chain in growing if not chain.is_grown]
        if growing:
            _compute_tips(growing, runner)
            finite = _are_finite([chain.logits for chain in growing])
            growing = [chain for chain, ok in zip(growing, finite, strict=True) if ok]
    return {chain.want.req.key: DraftTree.chain(chain.path) for chain in chains}


def _compute_tips(chains: Sequence[_Chain], runner: StepRunner) -> None:
    rows = []
    for chain in chains:
        req = chain.want.req
        prefix_len = len(req.ids) + len(chain.path) - 1
        rows.append(runner.make_row(req, Phase.DECODE, prefix_len, (chain.path[-1],)))
    for chain, logits in zip(chains, runner.forward(rows), strict=True):
        chain.logits = logits
        chain.want.req.guessed_ids = list(chain.path)


# ---- several branches


@dataclass(slots=True)
class _Bush:
    """A tree under growth: `topk` lanes, each on a node of the level last selected."""

    want: Wanted
    logits: Tensor  # [1, V] behind the root, then [topk, V] behind the lanes
    paths: list[tuple[int, ...]]  # tokens from below the root to each lane's node
    scores: Tensor | None = None  # [1, topk]
    levels: list[Candidates] = field(default_factory=list)
    node_parents: list[int] = field(default_factory=list)  # of computed nodes, as in ReqStep


def _grow_bushes(
    bushes: Sequence[_Bush], topk: int, sampler: Sampler, runner: StepRunner
) -> dict[ReqKey, DraftTree]:
    growing = list(bushes)
    step = 0
    while growing:
        selection = _select(growing, step, topk, sampler)
        step += 1
        parent_lanes = selection.parent_lanes.tolist()
        input_ids = selection.input_ids.tolist()
        for b, bush in enumerate(growing):
            _climb(bush, selection, b, parent_lanes[b], input_ids[b], topk)
        growing = [bush for bush in growing if len(bush.levels) < bush.want.depth]
        if growing:
            _compute_lanes(growing, topk, runner)
    return {
        bush.want.req.key: build_trees(bush.levels, [bush.want.num_nodes], topk)[0]
        for bush in bushes
    }


def _select(bushes: Sequence[_Bush], step: int, topk: int, sampler: Sampler) -> Selection:
    num_lanes = 1 if step == 0 else topk
    rows = [_logit_row(bush.want.req, path) for bush in bushes for path in bush.paths[:num_lanes]]
    probs, token_ids = sampler.top_children(torch.cat([bush.logits for bush in bushes]), rows, topk)
    scores = [bush.scores for bush in bushes if bush.scores is not None]
    return select_top_k_tokens(step, probs, token_ids, torch.cat(scores) if scores else None, topk)


def _climb(
    bush: _Bush,
    selection: Selection,
    index: int,
    parent_lanes: list[int],
    input_ids: list[int],
    topk: int,
) -> None:
    """Takes row `index` of a selection: the lanes step onto the level's best nodes."""
    candidates, row = selection.candidates, slice(index, index + 1)
    bush.levels.append(
        Candidates(candidates.scores[row], candidates.token_ids[row], candidates.lane_gids[row])
    )
    bush.scores = selection.scores[row]
    bush.paths = [
        (*bush.paths[parent], token) for parent, token in zip(parent_lanes, input_ids, strict=True)
    ]
    # The nodes of the level before are the last `topk` computed ones; the root is none of them.
    first_node = len(bush.node_parents) - topk
    bush.node_parents += [first_node + p if first_node >= 0 else -1 for p in parent_lanes]


def _compute_lanes(bushes: Sequence[_Bush], topk: int, runner: StepRunner) -> None:
    rows = [
        runner.make_row(
            bush.want.req,
            Phase.DRAFT,
            len(bush.want.req.ids),
            tuple(path[-1] for path in bush.paths),
            parents=tuple(bush.node_parents),
            num_cached_nodes=len(bush.node_parents) - topk,
        )
        for bush in bushes
    ]
    for bush, logits in zip(bushes, runner.forward(rows), strict=True):
        bush.logits = logits
        if len(bush.levels) == 1:
            # Node 0 stands directly behind the root, in slot and position, as in a chain.
            bush.want.req.guessed_ids = [bush.paths[0][0]]


def _logit_row(req: DraftReq, path_ids: tuple[int, ...]) -> LogitRow:
    return LogitRow(req.params, req.ids, (), path_ids)
