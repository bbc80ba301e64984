"""Plans by hand: rows that own pages, grown step by step, as a scheduler would."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.worker.step import Phase, ReqStep, StepPlan


@dataclass
class Row:
    """One row of `req_to_token`: where its sequence stands and which pages it has."""

    index: int
    pages: list[int]  # free ones of its own, taken from the front
    page_size: int
    kv_len: int = 0
    num_pages: int = field(default=0, init=False)

    def step(
        self,
        input_ids: Sequence[int],
        phase: Phase = Phase.PREFILL,
        *,
        parents: tuple[int, ...] | None = None,
        num_cached_nodes: int = 0,
        num_logits: int = -1,
        commit: int | None = None,
    ) -> ReqStep:
        """Computes `input_ids` behind the row; `commit` of them stay, all unless said otherwise."""
        last = self.kv_len + num_cached_nodes + len(input_ids)
        wanted = -(-last // self.page_size) - self.num_pages
        new, self.pages = self.pages[: max(wanted, 0)], self.pages[max(wanted, 0) :]
        assert len(new) >= wanted, "the test gave the row too few pages"
        row = ReqStep(
            self.index,
            phase,
            self.kv_len,
            tuple(input_ids),
            page_start=self.num_pages,
            pages=tuple(new),
            parents=parents,
            num_cached_nodes=num_cached_nodes,
            num_logits=num_logits,
        )
        self.num_pages += len(new)
        self.kv_len += len(input_ids) if commit is None else commit
        return row


def make_rows(count: int, num_pages: int, page_size: int) -> list[Row]:
    """Rows whose pages lie scattered: row i has every `count`-th page, from the last backwards."""
    return [
        Row(i, [p for p in range(num_pages, 0, -1) if p % count == i], page_size)
        for i in range(count)
    ]


def plan(*rows: ReqStep, step_id: int = 0) -> StepPlan:
    return StepPlan(step_id, rows)
