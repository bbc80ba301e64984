"""Trees of draft tokens and the logits behind their nodes → the tokens that a target accepts.

The host's way, from the reqs' own lists. By the rule `coupled` a tree is accepted by the one greedy
walk against the target's own tokens, which the sampler chooses by seed and position. So the tokens
are those of plain decoding, whatever was drafted, at every temperature. By the rule `rejection` a
sampling req's tree is walked by chance: the tokens are distributed as the target's, no more. What
is greedy is the same under both.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet, VerifyResult
from paceline.kernels.checks import check_thresholds
from paceline.worker.logit_stages import (
    NodeRows,
    ProcessedRows,
    apply_processors,
    token_logprobs,
)
from paceline.worker.noise import FINAL_COIN, WALK_COIN, coins, signed_seed
from paceline.worker.sampler import NO_TOKEN, LogitRow, Sampler
from paceline.worker.step import SamplingRow

# The target's token at a node that was not asked is NO_TOKEN as well: no draft token equals it, and
# a walk comes only to nodes that were.
_PADDING_ID = -2
UNLINKED = -2  # the parent of a node that no walk comes to


@dataclass(frozen=True, slots=True)
class NodeTree:
    """The nodes of one req, root first, and where their logits begin.

    `parents[i]` is smaller than i, -1 for the root and UNLINKED for a node that fills up. A row
    without drafts is its root alone.
    """

    first_logit: int
    draft_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sampling: SamplingRow

    @property
    def is_root(self) -> bool:
        """Whether it has no drafts."""
        return len(self.draft_ids) == 1

    @property
    def is_greedy(self) -> bool:
        return self.sampling.params.is_greedy

    def logit_row(self, node: int) -> LogitRow:
        path_ids = tuple(self.draft_ids[i] for i in self.path(node)) if node else ()
        sampling = self.sampling
        return LogitRow(sampling.params, sampling.prompt_ids, sampling.output_ids, path_ids)

    def path(self, node: int) -> list[int]:
        """The nodes from below the root, which is committed, to `node`."""
        path: list[int] = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self, node: int) -> list[int]:
        return [i for i in range(node + 1, len(self.parents)) if self.parents[i] == node]

    def tried_ids(self) -> list[int]:
        """What a walk may accept of each node: _PADDING_ID, for nothing, where a sibling before it
        holds the same token, which would be tried twice, or where it holds none: NO_TOKEN would
        equal the target's where that has none."""
        seen: set[tuple[int, int]] = set()
        ids = []
        for token, parent in zip(self.draft_ids, self.parents, strict=True):
            ids.append(token if token >= 0 and (parent, token) not in seen else _PADDING_ID)
            seen.add((parent, token))
        return ids

    def max_depth(self) -> int:
        return max(len(self.path(node)) for node in range(len(self.parents)))

    def node_rows(self, device: torch.device) -> NodeRows:
        num_nodes = len(self.draft_ids)
        is_on_path = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        for node in range(1, num_nodes):
            is_on_path[node, self.path(node)] = True
        return NodeRows(torch.tensor(self.draft_ids, device=device), is_on_path.to(device))


@dataclass(frozen=True, slots=True)
class Walk:
    """What came of a tree: new_ids[i] was chosen behind node path[i]; the last may be NO_TOKEN.

    `logprobs` is as long where the req wants them, else ().
    """

    new_ids: tuple[int, ...]
    path: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


def walk_trees(
    trees: Sequence[NodeTree],
    logits: Tensor,
    sampler: Sampler,
    kernels: KernelSet,
    *,
    mask: Tensor | None = None,
    max_depth: int | None = None,
    num_simulated: int = 0,
) -> list[Walk]:
    """Walks each tree by the sampler's rule.

    Args:
        logits: [n, V] fp32 of all trees, V >= vocab_size.
        mask: [n, ceil(vocab_size / 32)] int32, see `apply_mask`.
        max_depth: most drafts accepted; None for as deep as the trees are.
        num_simulated: tokens that a tree of as many nodes yields, made up: its first drafts, then
            what was chosen behind its root. 0 for what was accepted.
    """
    logits = logits[:, : sampler.vocab_size]
    processed = [
        ProcessedRows(t.first_logit, t.node_rows(logits.device), t.sampling.processors)
        for t in trees
        if t.sampling.processors
    ]
    rows = _Rows(apply_processors(logits, processed), mask, sampler, kernels, max_depth)
    walks = _walk_coupled(trees, rows) if sampler.spec.rule == "coupled" else _reject(trees, rows)
    if num_simulated:
        walks = [
            _simulated(tree, walk, num_simulated) for tree, walk in zip(trees, walks, strict=True)
        ]
    return _with_logprobs(trees, walks, rows)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The logits of a step, through its processors, and what chooses from them."""

    logits: Tensor
    mask: Tensor | None
    sampler: Sampler
    kernels: KernelSet
    max_depth: int | None

    @property
    def is_lazy(self) -> bool:
        """Whether a node costs the transforms of a vocabulary, one after the other."""
        return self.logits.device.type == "cpu"

    def take(self, index: list[int]) -> tuple[Tensor, Tensor | None]:
        """(logits, mask) of some rows."""
        return take(self.logits, index), None if self.mask is None else take(self.mask, index)


def take(rows: Tensor, index: list[int]) -> Tensor:
    """The rows of `index`; a view where it steps evenly, since a copy costs more than a choice."""
    step = index[1] - index[0] if len(index) > 1 else 1
    if step > 0 and index and index == list(range(index[0], index[-1] + 1, step)):
        return rows[index[0] : index[-1] + 1 : step]
    return rows[index]


_WalkAll = Callable[[Sequence[NodeTree], _Rows], list[Walk]]


def _simulated(tree: NodeTree, walk: Walk, num_new_tokens: int) -> Walk:
    num_new_tokens = min(num_new_tokens, len(tree.draft_ids))
    new_ids = (*tree.draft_ids[1:num_new_tokens], walk.new_ids[0])
    return Walk(new_ids, tuple(range(num_new_tokens)))


def _with_logprobs(trees: Sequence[NodeTree], walks: list[Walk], rows: _Rows) -> list[Walk]:
    wanted = [i for i, tree in enumerate(trees) if tree.sampling.wants_logprobs]
    if not wanted:
        return walks
    places = [(trees[i], node) for i in wanted for node in walks[i].path]
    logits, mask = rows.take([tree.first_logit + node for tree, node in places])
    device = logits.device
    logits = rows.sampler.adjusted(logits, [tree.logit_row(node) for tree, node in places], mask)
    temperatures = [tree.sampling.params.temperature or 1.0 for tree, _ in places]
    new_ids = [token for i in wanted for token in walks[i].new_ids]
    logprobs = token_logprobs(
        logits,
        torch.tensor(temperatures, device=device),
        torch.tensor(new_ids, device=device),
    ).tolist()
    for i in wanted:
        num_new = len(walks[i].new_ids)
        walks[i] = Walk(walks[i].new_ids, walks[i].path, tuple(logprobs[:num_new]))
        del logprobs[:num_new]
    return walks


# ---- by the target's own tokens


def _walk_coupled(trees: Sequence[NodeTree], rows: _Rows) -> list[Walk]:
    targets = _choose(trees, rows)
    drafted = [i for i, tree in enumerate(trees) if not tree.is_root]
    walks = [Walk((target[0],), (0,)) for target in targets]
    if drafted:
        batch = _Padded([trees[i] for i in drafted], rows)
        result = rows.kernels.verify_tree_greedy(
            batch.draft_ids,
            rows.kernels.build_tree_links(batch.parents),
            batch.pad([targets[i] for i in drafted], NO_TOKEN),
            batch.max_depth,
        )
        for i, walk in zip(drafted, batch.walks(result), strict=True):
            walks[i] = walk
    return walks


def _choose(trees: Sequence[NodeTree], rows: _Rows) -> list[list[int]]:
    """The target's token at each node of each tree.

    Plain greedy trees are chosen whole, and on a GPU all are, in one call. Elsewhere only the nodes
    the walk comes to are chosen, level by level; the others keep NO_TOKEN.
    """
    targets = [[NO_TOKEN] * len(tree.draft_ids) for tree in trees]
    nodes: list[tuple[int, int]] = []  # (tree, node)
    walked: set[int] = set()
    for k, tree in enumerate(trees):
        if rows.is_lazy and not tree.is_root and not tree.logit_row(0).is_plain:
            walked.add(k)
            nodes.append((k, 0))
        else:
            nodes += [(k, node) for node in range(len(tree.draft_ids))]
    while nodes:
        logits, mask = rows.take([trees[k].first_logit + node for k, node in nodes])
        logit_rows = [trees[k].logit_row(node) for k, node in nodes]
        chosen: list[int] = rows.sampler.choose(logits, logit_rows, mask).tolist()
        reached = []
        for (k, node), token in zip(nodes, chosen, strict=True):
            targets[k][node] = token
            if k in walked:
                children = trees[k].children(node)
                reached += [(k, c) for c in children if trees[k].draft_ids[c] == token][:1]
        nodes = reached
    return targets


# ---- by chance


def _reject(trees: Sequence[NodeTree], rows: _Rows) -> list[Walk]:
    """What is greedy has one outcome, which the coupled walk finds. Rows without drafts are walked
    apart from trees: distributions of a batch are as wide as its trees."""
    walks: dict[int, Walk] = {}
    ways: tuple[tuple[_WalkAll, Callable[[NodeTree], bool]], ...] = (
        (_walk_coupled, lambda tree: tree.is_greedy),
        (_walk_by_chance, lambda tree: not tree.is_greedy and tree.is_root),
        (_walk_by_chance, lambda tree: not tree.is_greedy and not tree.is_root),
    )
    for walk_all, is_member in ways:
        members = [i for i, tree in enumerate(trees) if is_member(tree)]
        if members:
            walks.update(zip(members, walk_all([trees[i] for i in members], rows), strict=True))
    return [walks[i] for i in range(len(trees))]


def _walk_by_chance(trees: Sequence[NodeTree], rows: _Rows) -> list[Walk]:
    batch = _Padded(trees, rows)
    spec = rows.sampler.spec
    seeds, positions = batch.seeds_and_positions()
    walk_coins = coins(rows.kernels, seeds, positions, WALK_COIN)
    probs, unusable = _distributions(batch, rows, walk_coins.tolist())
    result = rows.kernels.tree_speculative_sampling_target_only(
        batch.draft_ids,
        rows.kernels.build_tree_links(batch.parents),
        probs,
        walk_coins,
        coins(rows.kernels, seeds[:, 0], positions[:, 0], FINAL_COIN),
        batch.max_depth,
        spec.threshold_single,
        spec.threshold_acc,
    )
    walks = batch.walks(result)
    for k, walk in enumerate(walks):
        if (k, walk.path[-1]) in unusable:
            walks[k] = Walk((*walk.new_ids[:-1], NO_TOKEN), walk.path)
    return walks


def _distributions(
    batch: "_Padded", rows: _Rows, walk_coins: list[list[float]]
) -> tuple[Tensor, set[tuple[int, int]]]:
    """(the target's distribution behind each node [bs, width, V]; (tree, node) without one).

    On a CPU only those of nodes that the walk comes to; the others are 0.
    """
    trees = batch.trees
    probs = torch.zeros(len(trees), batch.width, rows.sampler.vocab_size, device=rows.logits.device)
    unusable: set[tuple[int, int]] = set()
    nodes = [(k, 0) for k in range(len(trees))]
    if not rows.is_lazy:
        nodes = [(k, node) for k, tree in enumerate(trees) for node in range(len(tree.parents))]
    while nodes:
        logits, mask = rows.take([trees[k].first_logit + node for k, node in nodes])
        logit_rows = [trees[k].logit_row(node) for k, node in nodes]
        chosen, is_unusable = rows.sampler.target_probs(logits, logit_rows, mask)
        reached = []
        for (k, node), row, has_none in zip(nodes, chosen, is_unusable.tolist(), strict=True):
            probs[k, node] = row
            if has_none:
                unusable.add((k, node))
            if rows.is_lazy:
                reached += _accepted(trees[k], node, row, walk_coins[k][node], k, rows)
        nodes = reached
    return probs, unusable


def _accepted(
    tree: NodeTree, node: int, q: Tensor, coin: float, k: int, rows: _Rows
) -> list[tuple[int, int]]:
    """(k, the child that the walk goes on to), as the kernel will decide; [] for none."""
    spec = rows.sampler.spec
    single, acc_factor = check_thresholds(spec.threshold_single, spec.threshold_acc)
    total = 0.0
    ids = tree.tried_ids()
    for child in tree.children(node):
        token = ids[child]
        prob = float(q[token]) if 0 <= token < len(q) else 0.0
        total += prob
        if prob > 0.0 and (coin * acc_factor < total or prob >= single):
            return [(k, child)]
    return []


# ---- trees of a batch


class _Padded:
    """Trees as tensors, filled up to the widest with nodes that are linked nowhere."""

    def __init__(self, trees: Sequence[NodeTree], rows: _Rows) -> None:
        self.trees = trees
        self.width = max(len(tree.draft_ids) for tree in trees)
        self._device = rows.logits.device
        deepest = max(tree.max_depth() for tree in trees)
        self.max_depth = deepest if rows.max_depth is None else min(rows.max_depth, deepest)
        self.draft_ids = self.pad((tree.tried_ids() for tree in trees), _PADDING_ID)
        self.parents = self.pad([tree.parents for tree in trees], UNLINKED)

    def pad(self, rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        """[bs, width] int64."""
        cells = [[*row, *[fill] * (self.width - len(row))] for row in rows]
        return torch.tensor(cells, dtype=torch.int64, device=self._device)

    def seeds_and_positions(self) -> tuple[Tensor, Tensor]:
        """Of the token behind each node, [bs, width] int64 each."""
        seeds = [[signed_seed(tree.sampling.params.seed)] * self.width for tree in self.trees]
        positions = [
            [tree.logit_row(node).position for node in range(len(tree.parents))]
            for tree in self.trees
        ]
        return self.pad(seeds, 0), self.pad(positions, 0)

    def walks(self, result: VerifyResult) -> list[Walk]:
        predict = result.predict.tolist()
        walks = []
        for nodes in result.accept_index.tolist():
            path = [node for node in nodes if node >= 0]
            new_ids = tuple(predict[node] for node in path)
            walks.append(Walk(new_ids, tuple(node % self.width for node in path)))
        return walks
