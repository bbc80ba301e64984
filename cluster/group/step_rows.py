"""Rows of a step: planned reqs and their draft trees -> the ReqSteps of a plan, in order. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cluster.group.req_state import ReqState
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import (
    PageId,
    Phase,
    ReqId,
    ReqStep,
    SamplingRow,
    SpecShape,
    StepPlan,
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A planned row: its req, with slots for all its tokens."""

    req: ReqState
    pages: Sequence[PageId]  # all the req owns, read only
    num_tokens: int  # nodes with the root at most when it decodes, else of its prompt
    is_decoding: bool
    is_speculating: bool = False  # the ranks grow its tree


@dataclass(frozen=True, slots=True)
class BuiltStep:
    plan: StepPlan
    sampling: list[SamplingRow | None]
    rows: list[StepRow]  # in the order of the plan


def build_step(
    step_id: int,
    rows: Sequence[StepRow],
    trees: Mapping[ReqId, DraftTree],
    shape: SpecShape | None = None,
    *,
    runs_ahead: bool = False,
) -> BuiltStep:
    """The plan of planned rows, with a draft tree behind some of those that decode.

    Args:
        shape: of the trees that the ranks grow.
        runs_ahead: the step before is still in flight: the ranks know the last tokens, not we.
    """
    built = [
        (row, build_row(row, trees.get(row.req.req_id), runs_ahead=runs_ahead)) for row in rows
    ]
    built.sort(key=lambda pair: _PHASE_ORDER[pair[1].phase])
    return BuiltStep(
        plan=StepPlan(step_id, tuple(step for _, step in built), shape),
        sampling=[row.req.sampling if step.num_logits else None for row, step in built],
        rows=[row for row, _ in built],
    )


def build_row(row: StepRow, tree: DraftTree | None, *, runs_ahead: bool = False) -> ReqStep:
    """One row, which brings the pages that its row of `req_to_token` does not have yet."""
    req = row.req
    start = req.num_computed_tokens
    parents: tuple[int, ...] | None = None
    num_logits = next_id = -1
    input_ids: tuple[int, ...]
    if not row.is_decoding:
        phase = Phase.PREFILL
        input_ids = req.ids_between(start, start + row.num_tokens)
        num_logits = 1
        if start + row.num_tokens < req.num_tokens:
            num_logits = 0
            (next_id,) = req.ids_between(start + row.num_tokens, start + row.num_tokens + 1)
    elif row.is_speculating:
        phase = Phase.SPECULATE
        input_ids = () if runs_ahead else (req.output_ids[-1],)
    elif tree is None or tree.num_nodes == 1 or row.num_tokens == 1:
        phase = Phase.DECODE
        input_ids = (req.output_ids[-1],)
    else:
        phase = Phase.VERIFY
        if tree.num_nodes > row.num_tokens:
            tree = tree.truncate(row.num_tokens)
        input_ids = (req.output_ids[-1], *tree.token_ids)
        parents = (-1, *tree.parents)
    return ReqStep(
        req_pool_index=req.req_pool_index,
        phase=phase,
        prefix_len=start,
        input_ids=input_ids,
        page_start=req.num_written_pages,
        pages=tuple(row.pages[req.num_written_pages :]),
        parents=parents,
        num_logits=num_logits,
        next_id=next_id,
    )


_PHASE_ORDER = {Phase.DECODE: 0, Phase.VERIFY: 1, Phase.SPECULATE: 1, Phase.PREFILL: 2}
