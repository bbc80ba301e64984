"""Dispatch: within every budget, in order, the same every time, and nobody starves."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.scheduling.dispatch import (
    Assignment,
    DispatchPolicy,
    GroupLoad,
    WaitingReq,
    dispatch,
    hash_prefix,
)
from paceline.cluster.scheduling.req_queue import ReqQueue, sort_waiting
from paceline.worker.step import ReqId

POLICY = DispatchPolicy(
    max_wait_s=10.0, num_output_tokens_charged=16, max_pending_prefill_tokens=200
)


def req(
    req_id: str,
    num_prompt_tokens: int = 10,
    *,
    max_tokens: int = 8,
    priority: int = 0,
    deadline_s: float | None = None,
    prefix_hash: int = 0,
    arrival_s: float = 0.0,
) -> WaitingReq:
    return WaitingReq(
        ReqId(req_id), num_prompt_tokens, max_tokens, priority, deadline_s, prefix_hash, arrival_s
    )


def load(
    group_id: str,
    num_free_pages: int = 100,
    *,
    page_size: int = 4,
    num_pages: int = 100,
    num_running_reqs: int = 0,
    max_num_reqs: int = 8,
    num_pending_prefill_tokens: int = 0,
    draining: bool = False,
    prefix_hashes: frozenset[int] = frozenset(),
) -> GroupLoad:
    return GroupLoad(
        group_id,
        page_size,
        num_pages,
        num_free_pages,
        num_running_reqs,
        0,
        max_num_reqs,
        num_pending_prefill_tokens,
        draining,
        prefix_hashes=prefix_hashes,
    )


def ids(assignments: list[Assignment]) -> list[tuple[str, str]]:
    return [(a.req_id, a.group_id) for a in assignments]


def test_priority_then_deadline_then_prefix_then_arrival_decide_the_order() -> None:
    waiting = [
        req("late", arrival_s=3.0),
        req("early", arrival_s=1.0),
        req("known", arrival_s=4.0, prefix_hash=77),
        req("due", arrival_s=5.0, deadline_s=20.0),
        req("sooner", arrival_s=5.5, deadline_s=19.0),
        req("urgent", arrival_s=6.0, priority=1),
    ]
    one_seat = [load("a", prefix_hashes=frozenset({77}))]
    order = [a.req_id for a in dispatch(waiting, one_seat, 7.0, POLICY)]
    assert order == ["urgent", "sooner", "due", "known", "early", "late"]


def test_a_req_goes_where_its_prefix_is_and_else_to_the_least_loaded() -> None:
    loads = [
        load("a", num_pending_prefill_tokens=50),
        load("b", num_free_pages=60),
        load("c", num_free_pages=90),
    ]
    assert ids(dispatch([req("r", prefix_hash=5)], loads, 0.0, POLICY)) == [("r", "c")]
    loads[0] = replace(loads[0], prefix_hashes=frozenset({5}))
    assert ids(dispatch([req("r", prefix_hash=5)], loads, 0.0, POLICY)) == [("r", "a")]


def test_a_burst_is_spread_over_groups() -> None:
    waiting = [req(f"r{i}", arrival_s=float(i)) for i in range(6)]
    assignments = dispatch(waiting, [load("a"), load("b")], 6.0, POLICY)
    assert sorted(a.group_id for a in assignments) == ["a", "a", "a", "b", "b", "b"]


def test_seats_pages_and_prompt_tokens_are_charged_within_a_round() -> None:
    waiting = [req(f"r{i}", 10, max_tokens=2, arrival_s=float(i)) for i in range(6)]

    def num_sent(group: GroupLoad) -> int:
        return len(dispatch(waiting, [group], 6.0, POLICY))

    assert num_sent(load("a")) == 6
    assert num_sent(load("a", num_running_reqs=5, max_num_reqs=8)) == 3
    assert num_sent(load("a", num_free_pages=8)) == 2
    assert num_sent(load("a", num_pending_prefill_tokens=165)) == 3


def test_nothing_goes_to_a_draining_group_or_past_its_deadline() -> None:
    assert dispatch([req("r")], [load("a", draining=True)], 0.0, POLICY) == []
    assert dispatch([req("r", deadline_s=5.0)], [load("a")], 5.0, POLICY) == []
    assert dispatch([req("r")], [], 0.0, POLICY) == []


def test_prompts_accepted_but_not_computed_count_against_pages() -> None:
    full = load("a", num_free_pages=20, num_pending_prefill_tokens=64)
    assert dispatch([req("r", 10)], [full], 0.0, POLICY) == []
    assert len(dispatch([req("r", 4, max_tokens=4)], [full], 0.0, POLICY)) == 1


def test_a_long_prompt_enters_a_group_with_nothing_to_compute() -> None:
    long = req("long", 300)
    assert len(dispatch([long], [load("a")], 0.0, POLICY)) == 1
    assert dispatch([long], [load("a", num_pending_prefill_tokens=1)], 0.0, POLICY) == []


def test_a_req_that_fills_the_pool_enters_an_empty_group() -> None:
    big = req("big", 396, max_tokens=1000)
    assert len(dispatch([big], [load("a")], 0.0, POLICY)) == 1
    assert dispatch([req("bigger", 400)], [load("a")], 0.0, POLICY) == []


def test_a_starved_req_gets_a_group_kept_free_for_it() -> None:
    big = req("big", 300, arrival_s=0.0)
    small = [req(f"s{i}", arrival_s=1.0 + i) for i in range(4)]
    busy = [load("a", num_free_pages=50), load("b", num_free_pages=40)]
    young = dispatch([big, *small], busy, 5.0, POLICY)
    assert {a.group_id for a in young} == {"a", "b"}
    starved = dispatch([big, *small], busy, 10.5, POLICY)
    assert {a.group_id for a in starved} == {"b"}
    assert "big" not in {a.req_id for a in starved}
    assert ids(dispatch([big, *small], [load("a"), *busy[1:]], 10.5, POLICY))[0] == ("big", "a")


def test_a_req_that_fits_nowhere_keeps_no_group_from_others() -> None:
    giant = req("giant", 4000, arrival_s=0.0)
    small = req("small", arrival_s=60.0)
    assert ids(dispatch([giant, small], [load("a")], 61.0, POLICY)) == [("small", "a")]


REQS = st.lists(
    st.builds(
        req,
        st.uuids().map(str),
        st.one_of(st.integers(1, 30), st.integers(1, 250)),
        max_tokens=st.integers(1, 64),
        priority=st.integers(-1, 1),
        deadline_s=st.none() | st.floats(0, 40, allow_nan=False),
        prefix_hash=st.integers(0, 3),
        arrival_s=st.floats(0, 20, allow_nan=False),
    ),
    min_size=2,
    max_size=12,
    unique_by=lambda r: r.req_id,
)
LOADS = st.lists(
    st.builds(
        load,
        st.sampled_from("abcdef"),
        st.integers(0, 100),
        page_size=st.sampled_from([1, 4, 16]),
        num_pages=st.just(100),
        num_running_reqs=st.integers(0, 5),
        max_num_reqs=st.integers(1, 6),
        num_pending_prefill_tokens=st.sampled_from([0, 0, 20, 150, 300]),
        draining=st.sampled_from([False, False, False, True]),
        prefix_hashes=st.frozensets(st.integers(1, 3), max_size=2),
    ),
    max_size=4,
    unique_by=lambda g: g.group_id,
)


@given(REQS, LOADS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_no_group_gets_more_than_it_reported_and_the_result_is_fixed(
    waiting: list[WaitingReq], loads: list[GroupLoad], shuffler: object
) -> None:
    assignments = dispatch(waiting, loads, 15.0, POLICY)
    assert len({a.req_id for a in assignments}) == len(assignments)
    by_id = {r.req_id: r for r in waiting}
    for group in loads:
        sent = [by_id[a.req_id] for a in assignments if a.group_id == group.group_id]
        if not sent:
            continue
        assert not group.draining
        assert group.num_running_reqs + len(sent) <= group.max_num_reqs
        pages = [-(-(r.num_prompt_tokens + 1) // group.page_size) for r in sent]
        pending = -(-group.num_pending_prefill_tokens // group.page_size)
        assert sum(pages) + pending <= group.num_free_pages
        tokens = group.num_pending_prefill_tokens + sum(r.num_prompt_tokens for r in sent)
        is_lone = len(sent) == 1 and group.num_pending_prefill_tokens == 0
        assert tokens <= POLICY.max_pending_prefill_tokens or is_lone
    shuffled = list(waiting)
    shuffler.shuffle(shuffled)  # type: ignore[attr-defined]
    assert dispatch(shuffled, loads[::-1], 15.0, POLICY) == assignments


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_req_is_served_however_many_better_ones_keep_coming(seed: int, big: bool) -> None:
    """One group of 2 seats; two urgent reqs arrive each second, each runs 3 to 5 seconds."""
    victim = req("victim", 380 if big else 10, priority=-5, arrival_s=0.0)
    queue = ReqQueue()
    queue.push(victim)
    running: dict[ReqId, tuple[int, int]] = {}  # end, pages
    for now in range(200):
        running = {r: (end, pages) for r, (end, pages) in running.items() if end > now}
        for i in range(2):
            queue.push(req(f"{now}-{i}", 10, priority=5, arrival_s=float(now)))
        group = load(
            "a",
            100 - sum(pages for _, pages in running.values()),
            num_running_reqs=len(running),
            max_num_reqs=2,
        )
        for chosen in dispatch(queue, [group], float(now), POLICY):
            taken = queue.remove(chosen.req_id)
            assert taken is not None
            if chosen.req_id == "victim":
                assert now <= 20, "it waited far longer than the bound"
                return
            pages = -(-(taken.num_prompt_tokens + 8) // 4)
            running[chosen.req_id] = (now + 3 + (seed + now) % 3, pages)
    pytest.fail("the req was never served")


def test_the_queue_keeps_its_totals_and_finds_the_expired() -> None:
    queue = ReqQueue()
    queue.push(req("a", 5, deadline_s=3.0))
    queue.push(req("b", 7))
    assert (len(queue), queue.num_prompt_tokens) == (2, 12)
    assert queue.expired(2.9) == []
    assert queue.expired(3.0) == ["a"]
    assert queue.remove(ReqId("a")) is not None
    assert queue.remove(ReqId("a")) is None
    assert (len(queue), queue.num_prompt_tokens) == (1, 7)
    assert [r.req_id for r in queue] == ["b"]
    assert ReqId("b") in queue


def test_the_starved_come_first_by_arrival_whatever_their_priority() -> None:
    waiting = [req("new", priority=9, arrival_s=9.0), req("old", arrival_s=1.0), req("older")]
    ordered = sort_waiting(waiting, 11.0, max_wait_s=10.0)
    assert [r.req_id for r in ordered] == ["older", "old", "new"]


def test_equal_beginnings_have_equal_hashes_of_64_bits() -> None:
    first = hash_prefix([*range(64), 1])
    assert first == hash_prefix([*range(64), 2]) != 0
    assert first != hash_prefix([1, *range(1, 64)])
    assert 0 < first < 2**64
    short = hash_prefix(list(range(63)))
    assert short == hash_prefix(list(range(48))) != first
    assert hash_prefix(list(range(15))) == 0
