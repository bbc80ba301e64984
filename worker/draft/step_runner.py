"""StepRunner: a draft's forwards, row by row. It orders rows into plans and hands logits back."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.worker.draft.reqs import DraftReq, DraftReqs
from paceline.worker.step import Phase, ReqStep, StepPlan

_PLAN_ORDER = {Phase.DECODE: 0, Phase.VERIFY: 1, Phase.DRAFT: 1, Phase.PREFILL: 2}


class DraftExecutor(Protocol):
    """What a proposer needs of an executor (worker/target/executor.py)."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, without page 0."""
        ...

    def forward(self, plan: StepPlan) -> Tensor | None:
        """fp32 logits of the wanted rows."""
        ...

    def heartbeat(self) -> None: ...

    def follow(self) -> None:
        """The whole life of a rank above 0."""
        ...

    def shutdown(self) -> None: ...


class StepRunner:
    """Runs rows of reqs that own their slots."""

    def __init__(self, executor: DraftExecutor, reqs: DraftReqs) -> None:
        self.step_id = 0
        self._executor = executor
        self._reqs = reqs

    def make_row(
        self,
        req: DraftReq,
        phase: Phase,
        prefix_len: int,
        input_ids: tuple[int, ...],
        *,
        num_logits: int = -1,
        parents: tuple[int, ...] | None = None,
        num_cached_nodes: int = 0,
    ) -> ReqStep:
        """A row of the next forward; it carries the pages that no earlier row of the req did."""
        assert req.row is not None
        page_start, pages = self._reqs.take_unsent_pages(req)
        return ReqStep(
            req_pool_index=req.row,
            phase=phase,
            prefix_len=prefix_len,
            input_ids=input_ids,
            page_start=page_start,
            pages=pages,
            parents=parents,
            num_cached_nodes=num_cached_nodes,
            num_logits=num_logits,
        )

    def forward(self, rows: Sequence[ReqStep]) -> list[Tensor]:
        """One forward of all rows. Returns the logits of each, [num_logits, V], in order."""
        order = sorted(range(len(rows)), key=lambda i: _PLAN_ORDER[rows[i].phase])
        plan = StepPlan(self.step_id, tuple(rows[i] for i in order))
        self.step_id += 1
        logits = self._executor.forward(plan)
        assert logits is not None, "a proposer runs on tp_rank 0"
        sizes = [
            len(row.input_ids) if row.num_logits == -1 else row.num_logits for row in plan.rows
        ]
        by_row = dict(zip(order, torch.split(logits, sizes), strict=True))
        return [by_row[i] for i in range(len(rows))]
