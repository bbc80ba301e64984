"""Logits of a step → its tokens: plain rows get one, trees are walked. tp_rank 0 alone decides.

A tree is accepted by the one greedy walk against the target's own tokens, which the sampler
chooses by seed and position. So the tokens are those of plain decoding, whatever the draft
proposed, at every temperature.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.errors import InternalError
from paceline.worker.sampler import NO_TOKEN, LogitRow, Sampler
from paceline.worker.step import Phase, ReqStep, RowResult, SamplingRow, StepPlan

# The target's token at a node that was not asked is NO_TOKEN as well: no draft token equals it, and
# a walk comes only to nodes that were.
_NOT_FINITE = (
    "its logits have no finite maximum: the model's weights or activations overflow or hold NaN "
    "there; bfloat16 and float32 hold greater values than float16"
)
_PADDING_ID = -2
_PADDING_PARENT = -2


@dataclass(frozen=True, slots=True)
class Decision:
    """What came of each row of a plan.

    `paths` holds the accepted nodes of a VERIFY row, its root 0 first, as many as the row has new
    tokens; () for other rows.
    """

    rows: tuple[RowResult, ...]
    paths: tuple[tuple[int, ...], ...]


def decide(
    plan: StepPlan,
    logits: Tensor | None,
    sampling: Sequence[SamplingRow | None],
    sampler: Sampler,
    kernels: KernelSet,
) -> Decision:
    """Chooses the tokens of every row of a plan.

    Args:
        plan: its DECODE, VERIFY and PREFILL rows.
        logits: [num_logits over all rows, V] fp32 in the plan's order; None when no row wants any.
        sampling: one per row; None where the row's tokens are not wanted.
    Returns: for a row with logits that no token can be chosen from, the tokens before them and an
        `error`. Nodes off the accepted path do not count.
    Raises: InternalError: the logits do not fit the plan.
    """
    singles: list[tuple[int, int, LogitRow]] = []  # (row of the plan, row of logits, req)
    trees: list[_Tree] = []
    num_logits = 0
    for i, (row, row_sampling) in enumerate(zip(plan.rows, sampling, strict=True)):
        first_logit = num_logits
        num_logits += _num_logits(row)
        if row_sampling is None or num_logits == first_logit:
            continue
        if row.phase is Phase.VERIFY:
            trees.append(_tree(i, row, first_logit, row_sampling))
        elif row.phase is Phase.DRAFT:
            raise InternalError("a DRAFT row is not for a target to decide")
        else:
            singles.append((i, num_logits - 1, _logit_row(row_sampling, ())))
    num_given = 0 if logits is None else logits.shape[0]
    if num_given != num_logits:
        raise InternalError(f"{num_given} rows of logits for a plan that wants {num_logits}")

    results = [RowResult()] * len(plan.rows)
    paths: list[tuple[int, ...]] = [()] * len(plan.rows)
    if logits is not None:
        tokens, targets = _choose(logits, singles, trees, sampler)
        for (i, _, _), token in zip(singles, tokens, strict=True):
            results[i] = _result((token,))
        accepted = _accept(trees, targets, kernels, logits.device)
        for tree, (new_ids, path) in zip(trees, accepted, strict=True):
            results[tree.index] = result = _result(new_ids)
            paths[tree.index] = path[: len(result.new_ids)]
    return Decision(tuple(results), tuple(paths))


@dataclass(frozen=True, slots=True)
class _Tree:
    """One VERIFY row: its nodes, root first, and where their logits begin."""

    index: int  # row of the plan
    first_logit: int
    draft_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sampling: SamplingRow

    def logit_row(self, node: int) -> LogitRow:
        path_ids: list[int] = []
        while node > 0:  # the root is committed, it ends output_ids
            path_ids.append(self.draft_ids[node])
            node = self.parents[node]
        return _logit_row(self.sampling, tuple(reversed(path_ids)))

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`."""
        for i in range(node + 1, len(self.draft_ids)):
            if self.parents[i] == node and self.draft_ids[i] == token_id:
                return i
        return None

    def max_depth(self) -> int:
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return max(depths)


def _result(new_ids: tuple[int, ...]) -> RowResult:
    """Of the tokens of a row, of which the last may be NO_TOKEN."""
    if new_ids[-1] != NO_TOKEN:
        return RowResult(new_ids, len(new_ids) - 1)
    return RowResult(new_ids[:-1], max(len(new_ids) - 2, 0), _NOT_FINITE)


def _logit_row(sampling: SamplingRow, path_ids: tuple[int, ...]) -> LogitRow:
    return LogitRow(sampling.params, sampling.prompt_ids, sampling.output_ids, path_ids)


def _num_logits(row: ReqStep) -> int:
    num_tokens = len(row.input_ids)
    return num_tokens if row.num_logits < 0 else min(row.num_logits, num_tokens)


def _tree(index: int, row: ReqStep, first_logit: int, sampling: SamplingRow) -> _Tree:
    num_nodes = len(row.input_ids)
    if row.num_cached_nodes or _num_logits(row) != num_nodes:
        raise InternalError(
            f"a VERIFY row of {num_nodes} nodes wants {row.num_logits} logits behind "
            f"{row.num_cached_nodes} cached nodes; it needs those of all nodes, none cached"
        )
    parents = row.parents if row.parents is not None else tuple(range(-1, num_nodes - 1))
    if len(parents) != num_nodes or any(not 0 <= p < i for i, p in enumerate(parents) if i):
        raise InternalError(f"parents {parents} are not those of {num_nodes} nodes below one root")
    return _Tree(index, first_logit, row.input_ids, parents, sampling)


def _choose(
    logits: Tensor,
    singles: list[tuple[int, int, LogitRow]],
    trees: list[_Tree],
    sampler: Sampler,
) -> tuple[list[int], list[list[int]]]:
    """The token of each single row, and the target's token at each node of each tree.

    Plain greedy trees are chosen whole, and on a GPU all are, in one call. Elsewhere a node costs
    the transforms of a vocabulary, so only the nodes the walk comes to are chosen, level by level;
    the others keep `NO_TOKEN`.
    """
    targets = [[NO_TOKEN] * len(tree.draft_ids) for tree in trees]
    wanted = [(logit, row) for _, logit, row in singles]
    nodes: list[tuple[int, int]] = []  # (tree, node) behind the singles in `wanted`
    walked: set[int] = set()
    for k, tree in enumerate(trees):
        if logits.device.type == "cpu" and not tree.logit_row(0).is_plain:
            walked.add(k)
            nodes.append((k, 0))
        else:
            nodes += [(k, node) for node in range(len(tree.draft_ids))]
    tokens: list[int] = []
    while wanted or nodes:
        wanted += [(trees[k].first_logit + node, trees[k].logit_row(node)) for k, node in nodes]
        chosen: list[int] = sampler.choose(
            _take(logits, [i for i, _ in wanted]), [row for _, row in wanted]
        ).tolist()
        num_singles = len(wanted) - len(nodes)
        tokens += chosen[:num_singles]
        reached = []
        for (k, node), token in zip(nodes, chosen[num_singles:], strict=True):
            targets[k][node] = token
            child = trees[k].child(node, token) if k in walked else None
            if child is not None:
                reached.append((k, child))
        nodes = reached
        wanted = []
    return tokens, targets


def _take(logits: Tensor, index: list[int]) -> Tensor:
    """The rows of `index`; a view where it steps evenly, since a copy costs more than a choice."""
    step = index[1] - index[0] if len(index) > 1 else 1
    if step > 0 and index == list(range(index[0], index[-1] + 1, step)):
        return logits[index[0] : index[-1] + 1 : step]
    return logits[index]


def _accept(
    trees: list[_Tree], targets: list[list[int]], kernels: KernelSet, device: torch.device
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(new ids, accepted nodes) of each tree."""
    if not trees:
        return []
    width = max(len(tree.draft_ids) for tree in trees)

    def padded(rows: Iterable[Sequence[int]], fill: int) -> Tensor:
        cells = [[*row, *[fill] * (width - len(row))] for row in rows]
        return torch.tensor(cells, dtype=torch.int64, device=device)  # [bs, width]

    links = kernels.build_tree_links(padded((tree.parents for tree in trees), _PADDING_PARENT))
    result = kernels.verify_tree_greedy(
        padded((tree.draft_ids for tree in trees), _PADDING_ID),
        links,
        padded(targets, NO_TOKEN),
        max(tree.max_depth() for tree in trees),
    )
    predict = result.predict.tolist()
    accepted = []
    for nodes in result.accept_index.tolist():
        path = [node for node in nodes if node >= 0]
        new_ids = tuple(predict[node] for node in path)
        accepted.append((new_ids, tuple(node % width for node in path)))
    return accepted
