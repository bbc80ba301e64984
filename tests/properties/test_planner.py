"""The planner: within tokens and pages, decodes first, and the best-ranked always moves on."""

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.scheduling.planner import (
    AdmissibleReq,
    PlanLimits,
    PlannedRow,
    PlannedStep,
    RunningReq,
    clip_shape,
    plan_step,
)
from paceline.worker.spec.limits import max_tree_nodes
from paceline.worker.step import PageId, ReqId, SpecShape

LIMITS = PlanLimits(
    page_size=4,
    max_num_reqs=8,
    max_num_batched_tokens=32,
    chunked_prefill_size=8,
    max_num_tokens=100,
    num_draft_tokens=5,
)


def decoding(name: str, num_tokens: int, *, order: int = 1, **changes: int) -> RunningReq:
    """Owns just the pages of what it computed."""
    base = RunningReq(
        ReqId(name),
        priority=0,
        order=order,
        num_tokens=num_tokens,
        num_computed_tokens=num_tokens - 1,
        num_pages=-(-(num_tokens - 1) // LIMITS.page_size),
        num_tokens_left=50,
        is_decoding=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # ints for int fields only


def prefilling(name: str, num_tokens: int, num_computed: int, *, order: int = 1) -> RunningReq:
    pages = -(-num_tokens // LIMITS.page_size)
    return RunningReq(ReqId(name), 0, order, num_tokens, num_computed, pages, 50, is_decoding=False)


def newcomer(name: str, num_tokens: int, *prefix: int, unused: int = 0) -> AdmissibleReq:
    return AdmissibleReq(ReqId(name), num_tokens, tuple(PageId(p) for p in prefix), unused)


def plan(
    running: list[RunningReq],
    waiting: list[AdmissibleReq],
    num_pages: int = 1000,
    limits: PlanLimits = LIMITS,
) -> PlannedStep:
    pages = {req.req_id: req.num_pages for req in running}
    return plan_step(running, waiting, num_pages, limits, pages.__getitem__)


def rows(step: PlannedStep) -> list[tuple[str, int]]:
    return [(row.req_id, row.num_tokens) for row in step.rows]


def test_decodes_and_prompt_chunks_share_a_step() -> None:
    step = plan([prefilling("p", 30, 8, order=1), decoding("d", 9, order=2)], [newcomer("n", 40)])
    assert rows(step) == [("d", 5), ("p", 8), ("n", 8)]
    assert [req.req_id for req in step.admitted] == ["n"]


def test_drafts_leave_at_least_half_of_the_rest_to_prompts() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=8)
    running = [decoding(f"d{i}", 9, order=i) for i in range(4)]
    assert rows(plan(running, [], limits=limits)) == [(f"d{i}", 2) for i in range(4)]
    step = plan(running, [newcomer("n", 20)], limits=limits)
    assert rows(step) == [*((f"d{i}", 1) for i in range(4)), ("n", 4)]


def test_a_verify_shrinks_to_what_is_left_of_output_context_and_pages() -> None:
    assert rows(plan([decoding("d", 9, num_tokens_left=3)], [])) == [("d", 3)]
    assert rows(plan([decoding("d", 9, num_tokens_left=1)], [])) == [("d", 1)]
    assert rows(plan([decoding("d", 98)], [])) == [("d", 3)]
    assert rows(plan([decoding("d", 9)], [], num_pages=1)) == [("d", 4)]
    assert rows(plan([decoding("d", 10)], [], num_pages=0)) == [("d", 3)]
    tree = replace(LIMITS, is_chain=False)
    assert rows(plan([decoding("d", 9, num_tokens_left=3)], [], limits=tree)) == [("d", 5)]


def test_without_pages_the_youngest_of_the_lowest_priority_gives_way() -> None:
    old, young = decoding("old", 9, order=1), decoding("young", 9, order=2)
    step = plan([young, old], [], num_pages=0)
    assert step.preempted == ("young",)
    assert rows(step) == [("old", 5)]
    step = plan([replace(young, priority=1), old], [], num_pages=0)
    assert step.preempted == ("old",)
    assert rows(step) == [("young", 5)]


def test_a_prompt_under_way_is_preempted_like_any_other() -> None:
    step = plan([decoding("d", 9, order=1), prefilling("p", 20, 8, order=2)], [], num_pages=0)
    assert step.preempted == ("p",)
    assert rows(step) == [("d", 5)]


def test_the_lowest_ranked_keeps_its_pages_and_waits() -> None:
    full = decoding("full", 12, order=1)
    step = plan([full, decoding("short", 13, order=2)], [], num_pages=0)
    assert step.preempted == ()
    assert rows(step) == [("full", 1)]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    running = [decoding(f"d{i}", 9, order=i) for i in range(3)]
    step = plan(running, [newcomer("n", 1)], num_pages=0)
    assert step.preempted
    assert step.admitted == ()


def test_admission_stops_at_the_first_that_does_not_fit() -> None:
    step = plan([], [newcomer("a", 8), newcomer("big", 80), newcomer("c", 4)], num_pages=20)
    assert [req.req_id for req in step.admitted] == ["a"]


def test_a_cached_prefix_saves_tokens_and_pages_but_counts_when_only_the_cache_keeps_it() -> None:
    assert rows(plan([], [newcomer("n", 10, 1, 2)], num_pages=1)) == [("n", 2)]
    assert rows(plan([], [newcomer("n", 10, 1, 2, unused=2)], num_pages=2)) == []
    assert rows(plan([], [newcomer("n", 10, 1, 2, unused=2)], num_pages=3)) == [("n", 2)]


def test_a_newcomer_leaves_each_running_req_a_page() -> None:
    running = [decoding("d", 10, num_tokens_left=1)]
    assert rows(plan(running, [newcomer("n", 8)], num_pages=2)) == [("d", 1)]
    assert rows(plan(running, [newcomer("n", 8)], num_pages=3)) == [("d", 1), ("n", 8)]


def test_no_more_reqs_run_than_have_seats() -> None:
    limits = replace(LIMITS, max_num_reqs=2)
    waiting = [newcomer(f"n{i}", 2) for i in range(4)]
    assert len(plan([decoding("d", 9)], waiting, limits=limits).admitted) == 1


def test_whole_prompts_are_split_only_when_the_step_is_too_small() -> None:
    limits = replace(LIMITS, chunked_prefill_size=0)
    step = plan([], [newcomer("a", 20), newcomer("b", 20)], limits=limits)
    assert rows(step) == [("a", 20)]
    step = plan([prefilling("a", 50, 32)], [newcomer("b", 14), newcomer("c", 1)], limits=limits)
    assert rows(step) == [("a", 18), ("b", 14)]
    assert rows(plan([], [newcomer("a", 50)], limits=limits)) == [("a", 32)]


def test_waiting_reqs_are_looked_at_only_as_far_as_needed() -> None:
    seen = []

    def waiting() -> Iterator[AdmissibleReq]:
        for i in range(100):
            seen.append(i)
            yield newcomer(f"n{i}", 20)

    plan_step([], waiting(), 1000, LIMITS, lambda _: 0)
    assert len(seen) == 5  # 4 chunks fill the step, the fifth finds no room


# ---- where the ranks draft

CHAIN = SpecShape(num_steps=4, topk=1, num_draft_tokens=5)
RESERVED = replace(LIMITS, reserve=10)


def speculate(
    running: list[RunningReq],
    waiting: list[AdmissibleReq],
    num_pages: int = 1000,
    limits: PlanLimits = RESERVED,
    shape: SpecShape = CHAIN,
) -> PlannedStep:
    pages = {req.req_id: req.num_pages for req in running}
    return plan_step(running, waiting, num_pages, limits, pages.__getitem__, lambda bs: shape)


def test_all_rows_that_speculate_share_one_shape_and_the_rest_is_for_prompts() -> None:
    running = [decoding("d", 9), decoding("e", 9, order=2), prefilling("p", 30, 8, order=3)]
    step = speculate(running, [newcomer("n", 40)])
    assert step.shape == CHAIN
    assert rows(step) == [("d", 5), ("e", 5), ("p", 8), ("n", 8)]
    assert [row.is_speculating for row in step.rows] == [True, True, False, False]


def test_a_suspect_gets_a_row_without_guesses_and_one_that_waits_none() -> None:
    running = [
        replace(decoding("d", 9), is_suspect=True),
        replace(decoding("e", 9, order=2), is_waiting=True),
    ]
    step = speculate(running, [])
    assert step.shape is None
    assert rows(step) == [("d", 1)]
    assert not step.rows[0].is_speculating
    assert speculate([*running, decoding("f", 9, order=3)], []).shape == CHAIN


def test_trees_shrink_to_the_tokens_of_a_step_and_to_what_helps() -> None:
    limits = replace(RESERVED, max_num_batched_tokens=8)
    running = [decoding(f"d{i}", 9, order=i) for i in range(4)]
    assert speculate(running, [], limits=limits).shape == SpecShape(1, 1, 2)
    step = speculate(running, [newcomer("n", 20)], limits=limits)
    assert step.shape == SpecShape(0, 1, 1)
    assert rows(step) == [*((f"d{i}", 1) for i in range(4)), ("n", 4)]
    left = [decoding("d", 9, num_tokens_left=3), decoding("e", 9, order=2, num_tokens_left=1)]
    assert speculate(left, []).shape == SpecShape(2, 1, 3)
    assert speculate(left[1:], []).shape == SpecShape(0, 1, 1)


def test_a_decoding_req_gets_its_whole_reserve_or_no_row() -> None:
    """Committed 8 tokens and a reserve of 10: 5 pages, of which it has 2."""
    assert rows(speculate([decoding("d", 9)], [], num_pages=3)) == [("d", 5)]
    assert rows(speculate([decoding("d", 9)], [], num_pages=2)) == []
    step = speculate([decoding("d", 9), decoding("e", 9, order=2)], [], num_pages=4)
    assert step.preempted == ()
    assert rows(step) == [("d", 5)]
    step = speculate([decoding("d", 9), decoding("e", 9, order=2)], [], num_pages=1)
    assert step.preempted == ("e",)
    assert rows(step) == [("d", 5)]


def test_a_newcomer_is_admitted_with_room_for_its_drafts() -> None:
    assert rows(speculate([], [newcomer("n", 8)], num_pages=4)) == []
    assert rows(speculate([], [newcomer("n", 8)], num_pages=5)) == [("n", 8)]


@given(
    num_steps=st.integers(0, 8),
    topk=st.integers(1, 4),
    share=st.floats(0, 1),
    max_nodes=st.integers(1, 40),
    max_steps=st.integers(-1, 10),
)
def test_a_clipped_shape_is_a_tree_that_can_grow(
    num_steps: int, topk: int, share: float, max_nodes: int, max_steps: int
) -> None:
    most = max_tree_nodes(num_steps, topk) if num_steps else 1
    shape = SpecShape(num_steps, topk, 1 + num_steps + int(share * (most - 1 - num_steps)))
    clipped = clip_shape(shape, max_nodes, max_steps)
    assert 1 <= clipped.num_draft_tokens <= min(max_nodes, shape.num_draft_tokens)
    assert 0 <= clipped.num_steps <= max(min(shape.num_steps, max_steps), 0)
    assert (clipped.num_steps == 0) == (clipped.num_draft_tokens == 1)
    if clipped.num_steps:
        assert clipped.num_draft_tokens <= max_tree_nodes(clipped.num_steps, topk)
        assert clipped.num_draft_tokens > clipped.num_steps
    if max_nodes >= shape.num_draft_tokens and max_steps >= num_steps:
        assert clipped == shape


@st.composite
def groups(
    draw: st.DrawFn,
) -> tuple[list[RunningReq], list[AdmissibleReq], int, PlanLimits]:
    limits = PlanLimits(
        page_size=draw(st.sampled_from([1, 4, 16])),
        max_num_reqs=6,
        max_num_batched_tokens=draw(st.integers(6, 40)),
        chunked_prefill_size=draw(st.sampled_from([0, 3, 8])),
        max_num_tokens=96,
        num_draft_tokens=draw(st.integers(1, 6)),
        is_chain=draw(st.booleans()),
    )
    running = []
    for order in range(draw(st.integers(0, 6))):
        num_tokens = draw(st.integers(2, 90))
        is_decoding = draw(st.booleans())
        num_computed = num_tokens - 1 if is_decoding else draw(st.integers(0, num_tokens - 1))
        num_owned = num_computed if is_decoding else num_tokens
        running.append(
            RunningReq(
                ReqId(f"r{order}"),
                draw(st.integers(0, 2)),
                order,
                num_tokens,
                num_computed,
                -(-num_owned // limits.page_size) + draw(st.integers(0, 1)) * is_decoding,
                draw(st.integers(1, 96 - num_tokens)),
                is_decoding,
            )
        )
    waiting = [newcomer(f"w{i}", draw(st.integers(1, 90))) for i in range(draw(st.integers(0, 4)))]
    # A lone req always fits: that much must be free beside what the running own.
    num_owned_pages = sum(req.num_pages for req in running)
    num_pages = max(-(-96 // limits.page_size), num_owned_pages) + draw(st.integers(0, 8))
    return running, waiting, num_pages - num_owned_pages, limits


@given(groups())
@settings(max_examples=400, deadline=None)
def test_a_plan_keeps_every_limit_and_somebody_moves_on(
    group: tuple[list[RunningReq], list[AdmissibleReq], int, PlanLimits],
) -> None:
    running, waiting, num_available, limits = group
    by_id = {req.req_id: req for req in running}
    step = plan_step(running, waiting, num_available, limits, lambda r: by_id[r].num_pages)
    assert step == plan_step(
        running[::-1], waiting, num_available, limits, lambda r: by_id[r].num_pages
    )

    assert sum(row.num_tokens for row in step.rows) <= limits.max_num_batched_tokens
    assert all(row.num_tokens >= 1 for row in step.rows)
    assert len({row.req_id for row in step.rows}) == len(step.rows)
    assert not {row.req_id for row in step.rows} & set(step.preempted)
    is_decoding = [row.is_decoding for row in step.rows]
    assert is_decoding == sorted(is_decoding, reverse=True)

    def pages_for(num_tokens: int) -> int:
        return -(-num_tokens // limits.page_size)

    left = num_available + sum(by_id[req_id].num_pages for req_id in step.preempted)
    for row in step.rows:
        req = by_id.get(row.req_id)
        if req is not None and row.is_decoding:
            footprint = req.num_computed_tokens + row.num_tokens
            assert footprint <= limits.max_num_tokens
            assert row.num_tokens <= limits.num_draft_tokens
            left -= max(pages_for(footprint) - req.num_pages, 0)
    left -= sum(pages_for(req.num_tokens) for req in step.admitted)
    assert left >= 0
    assert len(running) - len(step.preempted) + len(step.admitted) <= limits.max_num_reqs

    assert step.rows or not (running or waiting)
    decodes = [req for req in running if req.is_decoding]
    if decodes:
        best = min(decodes, key=lambda req: (-req.priority, req.order))
        prefills = [req for req in running if not req.is_decoding]
        outranked = any((-r.priority, r.order) < (-best.priority, best.order) for r in prefills)
        assert outranked or _has_row(step.rows, best.req_id)


@given(groups(), st.integers(1, 24), st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_plan_of_speculating_rows_keeps_every_limit(
    group: tuple[list[RunningReq], list[AdmissibleReq], int, PlanLimits],
    reserve: int,
    is_waiting: list[bool],
) -> None:
    running, waiting, num_available, limits = group
    limits = replace(limits, reserve=reserve)
    running = [
        replace(req, is_waiting=flag and req.is_decoding)
        for req, flag in zip(running, is_waiting, strict=False)
    ]
    by_id = {req.req_id: req for req in running}
    step = plan_step(
        running, waiting, num_available, limits, lambda r: by_id[r].num_pages, lambda bs: CHAIN
    )
    assert sum(row.num_tokens for row in step.rows) <= limits.max_num_batched_tokens
    decodes = [row for row in step.rows if row.is_decoding]
    assert all(row.is_speculating for row in decodes)
    assert not any(by_id[row.req_id].is_waiting for row in decodes)
    if decodes:
        assert step.shape is not None
        assert {row.num_tokens for row in decodes} == {step.shape.num_draft_tokens}

    def pages_for(num_tokens: int) -> int:
        return -(-num_tokens // limits.page_size)

    left = num_available + sum(by_id[req_id].num_pages for req_id in step.preempted)
    for row in decodes:
        req = by_id[row.req_id]
        left -= max(pages_for(req.num_computed_tokens + reserve) - req.num_pages, 0)
    left -= sum(pages_for(req.num_tokens + reserve) for req in step.admitted)
    assert left >= 0


def _has_row(planned: tuple[PlannedRow, ...], req_id: ReqId) -> bool:
    return any(row.req_id == req_id for row in planned)
