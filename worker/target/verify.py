"""Logits of a step → its tokens: plain rows get one, trees are walked. tp_rank 0 alone decides.

How trees are walked, and by which rule, is worker/target/tree_walk.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.errors import InternalError
from paceline.worker.row_results import row_result
from paceline.worker.sampler import Sampler
from paceline.worker.spec.simulation import simulated_num_new_tokens
from paceline.worker.step import Phase, ReqStep, RowResult, SamplingRow, StepPlan
from paceline.worker.target.tree_walk import NodeTree, Walk, walk_trees


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
    *,
    mask: Tensor | None = None,
) -> Decision:
    """Chooses the tokens of every row of a plan.

    Args:
        plan: its DECODE, VERIFY and PREFILL rows.
        logits: [num_logits over all rows, V] fp32 in the plan's order; None when no row wants any.
        sampling: one per row; None where the row's tokens are not wanted.
        mask: [num_logits over all rows, ceil(vocab_size / 32)] int32, see `apply_mask`.
    Returns: for a row with logits that no token can be chosen from, the tokens before them and an
        `error`. Nodes off the accepted path do not count.
    Raises: InternalError: the logits do not fit the plan.
    """
    trees: list[NodeTree] = []
    places: list[int] = []  # the row of the plan behind each tree
    num_logits = 0
    for i, (row, row_sampling) in enumerate(zip(plan.rows, sampling, strict=True)):
        first_logit = num_logits
        num_logits += _num_logits(row)
        if row_sampling is not None and num_logits > first_logit:
            trees.append(_tree(row, first_logit, num_logits, row_sampling))
            places.append(i)
    _check_rows("logits", 0 if logits is None else len(logits), num_logits)
    if mask is not None:
        _check_rows("a mask", len(mask), num_logits)

    results = [RowResult()] * len(plan.rows)
    paths: list[tuple[int, ...]] = [()] * len(plan.rows)
    if logits is not None and trees:
        num_simulated = _num_simulated(plan, sampler)
        walks = walk_trees(trees, logits, sampler, kernels, mask=mask, num_simulated=num_simulated)
        for i, tree, walk in zip(places, trees, walks, strict=True):
            is_verify = plan.rows[i].phase is Phase.VERIFY
            results[i] = _result(tree, walk, is_simulated=is_verify and num_simulated > 0)
            if is_verify:
                paths[i] = walk.path[: len(results[i].new_ids)]
    return Decision(tuple(results), tuple(paths))


def _check_rows(name: str, num_given: int, num_logits: int) -> None:
    if num_given != num_logits:
        raise InternalError(f"{num_given} rows of {name} for a plan that wants {num_logits}")


def _num_logits(row: ReqStep) -> int:
    num_tokens = len(row.input_ids)
    return num_tokens if row.num_logits < 0 else min(row.num_logits, num_tokens)


def _tree(row: ReqStep, first_logit: int, end: int, sampling: SamplingRow) -> NodeTree:
    """What a row asks: a VERIFY row's tree, or the token behind the last of its logits."""
    if row.phase in (Phase.DRAFT, Phase.SPECULATE):
        raise InternalError(f"a {row.phase.name} row is not for a target to decide")
    if row.phase is not Phase.VERIFY:
        return NodeTree(end - 1, row.input_ids[-1:], (-1,), sampling)
    num_nodes = len(row.input_ids)
    if row.num_cached_nodes or end - first_logit != num_nodes:
        raise InternalError(
            f"a VERIFY row of {num_nodes} nodes wants {row.num_logits} logits behind "
            f"{row.num_cached_nodes} cached nodes; it needs those of all nodes, none cached"
        )
    parents = row.parents if row.parents is not None else tuple(range(-1, num_nodes - 1))
    if len(parents) != num_nodes or any(not 0 <= p < i for i, p in enumerate(parents) if i):
        raise InternalError(f"parents {parents} are not those of {num_nodes} nodes below one root")
    return NodeTree(first_logit, row.input_ids, (-1, *parents[1:]), sampling)


def _num_simulated(plan: StepPlan, sampler: Sampler) -> int:
    """Tokens of each tree that are made up; 0 where they are chosen."""
    if not sampler.spec.is_simulated:
        return 0
    num_steps = plan.shape.num_steps if plan.shape is not None else sampler.spec.num_steps
    return simulated_num_new_tokens(sampler.spec, plan.step_id, num_steps)


def _result(tree: NodeTree, walk: Walk, *, is_simulated: bool) -> RowResult:
    return row_result(
        walk.new_ids,
        walk.logprobs,
        num_proposed=len(tree.draft_ids) - 1,
        is_simulated=is_simulated,
    )
