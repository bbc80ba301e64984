"""Planner: one group's reqs + free pages + limits -> what the next step computes. Pure.

A req catches up: it has `num_computed_tokens` and wants `num_tokens`. Reqs that decode go first,
then prompts fill what is left of the step, chunk by chunk, so both share every step. Running out
of pages is an ordinary outcome: the req of the lowest rank gives its pages up and recomputes later.

Where the ranks themselves draft, all reqs that decode share one tree shape per step, and own slots
for whatever a step may write behind their committed tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from paceline.worker.spec.limits import max_tree_nodes
from paceline.worker.step import PageId, ReqId, SpecShape


@dataclass(frozen=True, slots=True)
class PlanLimits:
    page_size: int
    max_num_reqs: int  # running at once
    max_num_batched_tokens: int
    chunked_prefill_size: int  # 0: a prompt is split only where the step's token limit forces it
    max_num_tokens: int  # that one req may own slots for
    num_draft_tokens: int = 1  # nodes with the root; 1 without a drafter
    is_chain: bool = True  # drafts never branch: more nodes than tokens left are of no use
    reserve: int = 0  # slots behind its tokens that a req owns for a draft on the same ranks


@dataclass(frozen=True, slots=True)
class RunningReq:
    req_id: ReqId
    priority: int
    order: int  # of admission: later is younger
    num_tokens: int  # prompt and output
    num_computed_tokens: int  # with final KV
    num_pages: int  # owned
    num_tokens_left: int  # output tokens it may still emit
    is_decoding: bool  # all but its last token are computed, and that one was emitted here
    is_waiting: bool = False  # for what comes of a step in flight: it gets no row now
    is_suspect: bool = False  # it gets a row without guesses


@dataclass(frozen=True, slots=True)
class AdmissibleReq:
    """A waiting req, with what the prefix cache has of it."""

    req_id: ReqId
    num_tokens: int
    prefix: tuple[PageId, ...] = ()
    num_unused_prefix_pages: int = 0  # that only the cache keeps, so they count as available


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Tokens of one req: nodes of its verify with the root at most, or a part of its prompt."""

    req_id: ReqId
    num_tokens: int
    is_decoding: bool
    is_speculating: bool = False  # the ranks grow its tree, of the step's shape


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Preempted reqs give their pages back first, then the admitted begin, then the rows grow."""

    rows: tuple[PlannedRow, ...] = ()  # decodes before prefills
    preempted: tuple[ReqId, ...] = ()
    admitted: tuple[AdmissibleReq, ...] = ()
    shape: SpecShape | None = None  # of the rows that speculate


def plan_step(
    running: Sequence[RunningReq],
    waiting: Iterable[AdmissibleReq],
    num_available_pages: int,
    limits: PlanLimits,
    num_exclusive_pages: Callable[[ReqId], int],
    choose_shape: Callable[[int], SpecShape] | None = None,
) -> PlannedStep:
    """Plans one step.

    Args:
        running: in any order.
        waiting: in the order in which they should be admitted; read only as far as there is room.
        num_available_pages: free, or evictable from the prefix cache.
        num_exclusive_pages: the pages that become available when a running req is preempted.
        choose_shape: the best shape for so many rows, where the ranks draft; it may get smaller.

    Returns: rows whose pages are all there once `preempted` are closed: a decoding req owns
        `num_computed_tokens + num_tokens` slots then, an admitted one slots for all its tokens;
        with a `reserve`, that many slots behind what is computed and behind all tokens. At least
        one row, unless nothing waits or runs, or every req waits: for what `preempted` gave up, or
        for a step in flight and the pages it has.
    """
    draft = _Draft(limits, num_available_pages, num_exclusive_pages)
    ranked = sorted(running, key=_rank)
    has_prefill = any(not req.is_decoding for req in ranked)
    waiting = iter(waiting)
    first_waiting = next(waiting, None)
    decoding = draft.take_decodes(ranked)
    has_other_work = has_prefill or first_waiting is not None
    shape = None
    if choose_shape is None:
        rows = draft.add_drafts(decoding, has_other_work=has_other_work)
    else:
        rows, shape = draft.speculate(decoding, choose_shape, has_other_work=has_other_work)
    rows += draft.take_prefills(ranked)
    if first_waiting is not None and not draft.preempted:
        num_seats = limits.max_num_reqs - len(ranked)
        rows += draft.admit(first_waiting, waiting, num_seats, num_running=len(ranked))
    return PlannedStep(tuple(rows), tuple(draft.preempted), tuple(draft.admitted), shape)


def clip_shape(shape: SpecShape, max_nodes: int, max_steps: int) -> SpecShape:
    """The shape with `max_nodes` nodes (the root is one) and `max_steps` levels below at most."""
    num_steps = max(min(shape.num_steps, max_steps, max_nodes - 1), 0)
    num_nodes = min(shape.num_draft_tokens, max_nodes)
    num_nodes = min(num_nodes, max_tree_nodes(num_steps, shape.topk)) if num_steps else 1
    return SpecShape(num_steps, shape.topk, num_nodes)


def _rank(req: RunningReq) -> tuple[int, int]:
    """Smaller is served first and preempted last."""
    return (-req.priority, req.order)


@dataclass(slots=True)
class _Draft:
    """A step in the making: what is left of its tokens and pages."""

    limits: PlanLimits
    num_pages_left: int
    num_exclusive_pages: Callable[[ReqId], int]
    num_tokens_left: int = 0
    has_prefill_row: bool = False
    preempted: list[ReqId] = field(default_factory=list)
    admitted: list[AdmissibleReq] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens_left = self.limits.max_num_batched_tokens

    def take_decodes(self, ranked: Sequence[RunningReq]) -> list[RunningReq]:
        """One token for each decoding req; for want of pages, those of the lowest rank give way."""
        victims = list(ranked)  # of the lowest rank last
        taken: list[RunningReq] = []
        gone: set[ReqId] = set()
        for req in ranked:
            if not req.is_decoding or req.req_id in gone or self.num_tokens_left == 0:
                continue
            if req.is_waiting:
                continue
            missing = self._missing_pages(req, self.limits.reserve or 1)
            while missing > self.num_pages_left and victims[-1].req_id != req.req_id:
                victim = victims.pop()
                gone.add(victim.req_id)
                self.preempted.append(victim.req_id)
                self.num_pages_left += self.num_exclusive_pages(victim.req_id)
            if missing > self.num_pages_left:
                continue  # it keeps its pages and waits for those that others will give back
            self.num_pages_left -= missing
            self.num_tokens_left -= 1
            taken.append(req)
        return taken

    def add_drafts(
        self, decoding: Sequence[RunningReq], *, has_other_work: bool
    ) -> list[PlannedRow]:
        """Room for drafts behind each, as far as tokens and pages go; they never preempt."""
        num_extra = self.num_tokens_left // 2 if has_other_work else self.num_tokens_left
        per_req = num_extra // max(len(decoding), 1)
        rows = []
        for req in decoding:
            num_nodes = min(self._max_nodes(req), 1 + per_req)
            num_owned = max(req.num_pages, self._pages_for(req.num_computed_tokens + 1))
            num_slots = (num_owned + self.num_pages_left) * self.limits.page_size
            num_nodes = min(num_nodes, num_slots - req.num_computed_tokens)
            needed = self._pages_for(req.num_computed_tokens + num_nodes)
            self.num_pages_left -= max(needed - num_owned, 0)
            self.num_tokens_left -= num_nodes - 1
            rows.append(PlannedRow(req.req_id, num_nodes, is_decoding=True))
        return rows

    def speculate(
        self,
        decoding: Sequence[RunningReq],
        choose_shape: Callable[[int], SpecShape],
        *,
        has_other_work: bool,
    ) -> tuple[list[PlannedRow], SpecShape | None]:
        """One shape for all that may speculate, cut to what tokens are left and to what helps."""
        able = [req for req in decoding if not req.is_suspect]
        shape = None
        if able:
            num_extra = self.num_tokens_left // 2 if has_other_work else self.num_tokens_left
            shape = clip_shape(
                choose_shape(len(able)),
                1 + num_extra // len(able),
                max(req.num_tokens_left for req in able) - 1,
            )
            self.num_tokens_left -= (shape.num_draft_tokens - 1) * len(able)
        rows = []
        for req in decoding:
            is_able = shape is not None and not req.is_suspect
            num_tokens = shape.num_draft_tokens if shape is not None and is_able else 1
            rows.append(
                PlannedRow(req.req_id, num_tokens, is_decoding=True, is_speculating=is_able)
            )
        return rows, shape

    def take_prefills(self, ranked: Sequence[RunningReq]) -> list[PlannedRow]:
        """The next chunk of prompts under way, which own all their pages since admission."""
        rows = []
        for req in ranked:
            if req.is_decoding or req.req_id in self.preempted:
                continue
            num_tokens = self._chunk(req.num_tokens - req.num_computed_tokens)
            if num_tokens == 0:
                break
            self._take_chunk(num_tokens)
            rows.append(PlannedRow(req.req_id, num_tokens, is_decoding=False))
        return rows

    def admit(
        self,
        first: AdmissibleReq,
        others: Iterable[AdmissibleReq],
        num_seats: int,
        *,
        num_running: int,
    ) -> list[PlannedRow]:
        """Newcomers in order, until one does not fit: nobody overtakes it.

        Each takes the pages of its whole prompt at once, and of its reserve. One page per running
        req is left over, so that a newcomer is not preempted by the very next tokens of those
        before it.
        """
        rows: list[PlannedRow] = []
        for req in chain([first], others):
            if len(rows) == num_seats:
                break
            num_prefix_tokens = len(req.prefix) * self.limits.page_size
            num_tokens = self._chunk(req.num_tokens - num_prefix_tokens)
            num_pages = self._pages_for(req.num_tokens + self.limits.reserve) - len(req.prefix)
            num_pages += req.num_unused_prefix_pages
            headroom = num_running + len(rows)
            if num_tokens == 0 or num_pages + headroom > self.num_pages_left:
                break
            self.num_pages_left -= num_pages
            self._take_chunk(num_tokens)
            self.admitted.append(req)
            rows.append(PlannedRow(req.req_id, num_tokens, is_decoding=False))
        return rows

    def _max_nodes(self, req: RunningReq) -> int:
        limits = self.limits
        num_nodes = min(limits.num_draft_tokens, limits.max_num_tokens - req.num_computed_tokens)
        if limits.is_chain or req.num_tokens_left == 1:
            num_nodes = min(num_nodes, req.num_tokens_left)
        return 1 if req.is_suspect else max(num_nodes, 1)

    def _chunk(self, num_tokens: int) -> int:
        """How much of a prompt goes into this step."""
        if self.limits.chunked_prefill_size > 0:
            num_tokens = min(num_tokens, self.limits.chunked_prefill_size)
        elif self.has_prefill_row and num_tokens > self.num_tokens_left:
            return 0  # another prompt fills this step; the next one may hold it whole
        return min(num_tokens, self.num_tokens_left)

    def _take_chunk(self, num_tokens: int) -> None:
        self.num_tokens_left -= num_tokens
        self.has_prefill_row = True

    def _missing_pages(self, req: RunningReq, num_new_tokens: int) -> int:
        return max(self._pages_for(req.num_computed_tokens + num_new_tokens) - req.num_pages, 0)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.page_size)
