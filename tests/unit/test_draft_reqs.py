"""What a draft remembers of its reqs: commits, syncs, guesses that came true, and pages."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.draft.reqs import DraftReq, DraftReqs, ReqKey
from paceline.worker.link.base import CommitRow, SyncRow
from paceline.worker.step import ReqId


def make_reqs(num_pages: int = 8, max_num_reqs: int = 4) -> DraftReqs:
    return DraftReqs(num_pages=num_pages, page_size=4, max_num_reqs=max_num_reqs)


def sync(req_id: str, ids: Sequence[int]) -> SyncRow:
    return SyncRow(ReqId(req_id), tuple(ids), 1, 0.0, 0, 1.0, 0.0)


def row(req_id: str, base_len: int, ids: Sequence[int]) -> CommitRow:
    return CommitRow(ReqId(req_id), base_len, tuple(ids), 0, 5)


def synced(reqs: DraftReqs, req_id: str, ids: Sequence[int], target: str = "t") -> DraftReq:
    reqs.sync(target, sync(req_id, ids))
    req = reqs.get(ReqKey(target, ReqId(req_id)))
    assert req is not None
    return req


def compute(reqs: DraftReqs, req: DraftReq, keep: Sequence[DraftReq] = ()) -> bool:
    """As a forward over all committed tokens would."""
    if not reqs.reserve(req, len(req.ids) + 3, keep):
        return False
    reqs.take_unsent_pages(req)
    req.kv_len = len(req.ids)
    return True


def test_a_repeated_or_overlapping_row_appends_only_its_rest() -> None:
    reqs = make_reqs()
    req = synced(reqs, "a", [1, 2, 3])
    for _ in range(2):
        assert reqs.commit("t", row("a", 3, [4, 5]))
    assert reqs.commit("t", row("a", 4, [5, 6]))
    assert req.ids == [1, 2, 3, 4, 5, 6]


def test_a_row_that_does_not_fit_asks_for_a_sync() -> None:
    reqs = make_reqs()
    req = synced(reqs, "a", [1, 2, 3])
    assert not reqs.commit("t", row("a", 5, [4]))  # a gap
    assert not reqs.commit("t", row("a", 2, [9]))  # another third token
    assert not reqs.commit("t", row("a", 2, []))  # behind what is held
    assert not reqs.commit("t", row("b", 1, [4]))  # unknown
    assert not reqs.commit("u", row("a", 3, [4]))  # another target's
    assert req.ids == [1, 2, 3]


def test_guesses_that_come_true_are_not_computed_again() -> None:
    req = synced(make_reqs(), "a", [1, 2, 3])
    req.kv_len, req.guessed_ids = 3, [4, 5, 6]
    req.commit([4, 5, 9])
    assert (req.kv_len, req.guessed_ids, req.prefix_len) == (5, [], 5)


def test_the_root_is_always_computed() -> None:
    req = synced(make_reqs(), "a", [1, 2, 3])
    req.kv_len = 3
    assert req.prefix_len == 2


def test_a_sync_that_agrees_keeps_the_kv_and_one_that_does_not_gives_it_up() -> None:
    reqs = make_reqs()
    req = synced(reqs, "a", range(1, 10))
    assert compute(reqs, req)
    assert synced(reqs, "a", range(1, 12)) is req
    assert (req.kv_len, req.row is not None) == (9, True)
    synced(reqs, "a", [1, 2, 3, 4, 5, 99, 98])
    assert (req.kv_len, req.row) == (0, None)
    assert reqs.reserve(req, 8, [])
    assert req.kv_len == 4  # the first page's tokens are as they were
    reqs.check()


def test_pages_of_another_req_are_never_written_again() -> None:
    """A req that shares a full page and is rewound into it gets a page of its own."""
    reqs = make_reqs()
    first = synced(reqs, "a", range(9))
    assert compute(reqs, first)
    reqs.share_prefix(first)
    second = synced(reqs, "b", range(9))
    assert reqs.reserve(second, 9, [first])
    assert second.kv_len == 8
    _, shared = reqs.take_unsent_pages(second)
    synced(reqs, "b", [0, 1, 77])
    assert reqs.reserve(second, 3, [first])
    _, own = reqs.take_unsent_pages(second)
    assert own[0] not in shared[:2]
    reqs.check()


def test_the_least_recently_used_req_gives_up_its_pages_but_not_its_tokens() -> None:
    reqs = make_reqs(num_pages=4)
    old, new = synced(reqs, "old", range(5)), synced(reqs, "new", range(20, 25))
    assert compute(reqs, old)
    assert compute(reqs, new)
    assert reqs.commit("t", row("old", 5, [5]))  # used again
    third = synced(reqs, "third", range(40, 45))
    assert compute(reqs, third, keep=[third])
    assert (old.row is not None, new.row) == (True, None)
    assert new.ids == list(range(20, 25))
    reqs.check()


def test_reqs_of_the_same_round_do_not_evict_each_other() -> None:
    reqs = make_reqs(num_pages=3)
    first, second = synced(reqs, "a", range(5)), synced(reqs, "b", range(20, 25))
    assert compute(reqs, first)
    assert not compute(reqs, second, keep=[first])
    assert first.row is not None
    reqs.check()


def test_rows_run_out_before_pages() -> None:
    reqs = make_reqs(num_pages=64, max_num_reqs=2)
    held = [synced(reqs, name, [1, 2]) for name in "abc"]
    assert all(compute(reqs, req) for req in held)
    assert [req.row is not None for req in held] == [False, True, True]


def test_too_many_reqs_are_forgotten_the_least_recently_used_first() -> None:
    reqs = make_reqs(max_num_reqs=1)
    for i in range(12):
        assert compute(reqs, synced(reqs, f"r{i}", [1, 2]))
    assert [key.req_id for key in reqs.held] == [f"r{i}" for i in range(4, 12)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sync", "commit", "compute", "forget"]),
            st.sampled_from("abcd"),
            st.lists(st.integers(0, 2), min_size=1, max_size=14),
        ),
        max_size=40,
    )
)
def test_no_page_is_lost_or_owned_twice(events: list[tuple[str, str, list[int]]]) -> None:
    reqs = make_reqs(num_pages=7, max_num_reqs=3)
    for event, name, ids in events:
        key = ReqKey("t", ReqId(name))
        req = reqs.get(key)
        if event == "sync":
            reqs.sync("t", sync(name, ids))
        elif event == "commit" and req is not None:
            assert reqs.commit("t", row(name, len(req.ids), ids))
        elif event == "compute" and req is not None and compute(reqs, req, keep=[req]):
            reqs.share_prefix(req)
        elif event == "forget":
            reqs.forget(key)
        reqs.check()
    for key in reqs.held:
        reqs.forget(key)
    counts = reqs.counts()
    assert counts.num_owned == counts.num_orphaned == 0
    assert counts.num_free + counts.num_cached == 7
