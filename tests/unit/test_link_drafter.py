"""A drafter over a scripted link: trees, fallbacks, counts, and what a silent draft costs."""

from collections.abc import Iterable, Sequence

import pytest

from paceline.worker.clock import FakeClock
from paceline.worker.config import SpecConfig
from paceline.worker.link.base import Commit, DraftLink, ProposalRow, Proposals
from paceline.worker.spec.breaker import CircuitBreaker
from paceline.worker.spec.drafter import DraftContext, Drafter, DraftHealth
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId, SamplingParams

SPEC = SpecConfig(method="standalone", num_steps=4, num_draft_tokens=5, draft_timeout_s=0.5)
PARAMS = SamplingParams(seed=1, max_tokens=40)


class ScriptedLink(DraftLink):
    """Answers with the same chain, or lets the whole time-out pass."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.up = True
        self.answers = True
        self.rtt_s = 0.01
        self.why_refused = ""
        self.num_asked = 0
        self.closed: list[ReqId] = []

    @property
    def epoch(self) -> Epoch:
        return Epoch(1)

    @property
    def is_up(self) -> bool:
        return self.up

    @property
    def refusal(self) -> str:
        return self.why_refused

    def exchange(self, commit: Commit, timeout_s: float) -> Proposals | None:
        self.num_asked += 1
        if not self.answers:
            self.clock.advance(timeout_s)
            return None
        self.clock.advance(self.rtt_s)
        rows = [ProposalRow(r.req_id, r.commit_len, DraftTree.chain([7, 8])) for r in commit.rows]
        return Proposals(commit.epoch, commit.round, tuple(rows), draft_us=9_000)

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        self.closed += req_ids

    def shutdown(self) -> None:
        self.up = False


class ConstantDrafter(Drafter):
    def __init__(self) -> None:
        self.num_rows = 0
        self.closed: list[ReqId] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        self.num_rows += len(contexts)
        return [DraftTree.chain([3]) for _ in contexts]

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        self.closed += req_ids

    def shutdown(self) -> None:
        self.num_rows = 0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def contexts(num: int, max_draft_tokens: int = 5) -> list[DraftContext]:
    return [DraftContext(ReqId(f"r{i}"), [1], [2], PARAMS, max_draft_tokens) for i in range(num)]


def test_a_round_gives_trees_and_is_counted(clock: FakeClock) -> None:
    drafter = LinkDrafter(ScriptedLink(clock), SPEC, clock=clock)
    assert drafter.propose(contexts(2)) == [DraftTree.chain([7, 8])] * 2
    counters = drafter.counters()
    assert (counters.num_rounds, counters.num_late, counters.num_draft_rows) == (1, 0, 2)
    assert counters.last_rtt_s == pytest.approx(0.01)
    assert counters.total_draft_us == 9_000


def test_its_health_says_what_was_late_and_why_the_draft_is_not_asked(clock: FakeClock) -> None:
    link = ScriptedLink(clock)
    drafter = LinkDrafter(link, SPEC, clock=clock)
    drafter.propose(contexts(2))
    assert drafter.health() == DraftHealth(is_up=True, num_rounds=1, rtt_s=pytest.approx(0.01))
    link.answers = False
    for _ in range(3):  # then the draft is given up for a while
        assert drafter.health().is_up
        drafter.propose(contexts(2))
    health = drafter.health()
    assert not health.is_up
    assert (health.num_rounds, health.num_late_rounds, health.num_fallback_rows) == (4, 3, 6)
    link.why_refused = "another vocabulary"
    assert drafter.health().refusal == "another vocabulary"


def test_the_round_trip_is_a_moving_average(clock: FakeClock) -> None:
    link = ScriptedLink(clock)
    drafter = LinkDrafter(link, SPEC, clock=clock)
    drafter.propose(contexts(1))
    link.rtt_s = 0.11
    drafter.propose(contexts(1))
    assert drafter.health().rtt_s == pytest.approx(0.02)
    for _ in range(60):
        drafter.propose(contexts(1))
    assert drafter.health().rtt_s == pytest.approx(0.11, rel=0.01)


def test_rows_without_a_fresh_tree_fall_back(clock: FakeClock) -> None:
    link, fallback = ScriptedLink(clock), ConstantDrafter()
    drafter = LinkDrafter(link, SPEC, fallback, clock=clock)
    link.answers = False
    assert drafter.propose(contexts(3)) == [DraftTree.chain([3])] * 3
    assert drafter.counters().num_fallback_rows == 3
    assert LinkDrafter(link, SPEC, clock=clock).propose(contexts(1)) == [None]


def test_a_row_without_room_is_nobodys(clock: FakeClock) -> None:
    link, fallback = ScriptedLink(clock), ConstantDrafter()
    assert LinkDrafter(link, SPEC, fallback, clock=clock).propose(contexts(2, 1)) == [None, None]
    assert (link.num_asked, fallback.num_rows) == (0, 0)


def test_a_link_that_is_down_costs_nothing(clock: FakeClock) -> None:
    link = ScriptedLink(clock)
    drafter = LinkDrafter(link, SPEC, ConstantDrafter(), clock=clock)
    link.up = False
    before_s = clock.monotonic()
    drafter.propose(contexts(1))
    assert (clock.monotonic(), link.num_asked) == (before_s, 0)
    assert drafter.counters().num_skipped == 1


def test_a_silent_draft_costs_a_small_share_of_the_time(clock: FakeClock) -> None:
    link = ScriptedLink(clock)
    drafter = LinkDrafter(link, SPEC, clock=clock)
    link.answers = False
    start_s, waited_s = clock.monotonic(), 0.0
    while clock.monotonic() - start_s < 600:
        before_s = clock.monotonic()
        drafter.propose(contexts(1))
        waited_s += clock.monotonic() - before_s
        clock.advance(0.05)  # the target's own step
    assert waited_s < 0.03 * 600
    link.answers = True
    clock.advance(31)  # the longest pause
    assert drafter.propose(contexts(1)) == [DraftTree.chain([7, 8])]
    assert drafter.propose(contexts(1)) == [DraftTree.chain([7, 8])]


def test_two_late_rounds_in_a_row_are_forgiven(clock: FakeClock) -> None:
    link = ScriptedLink(clock)
    drafter = LinkDrafter(link, SPEC, clock=clock)
    for answers in (False, False, True) * 3:
        link.answers = answers
        drafter.propose(contexts(1))
    assert link.num_asked == 9


def test_closed_reqs_are_told_to_the_link_and_the_fallback(clock: FakeClock) -> None:
    link, fallback = ScriptedLink(clock), ConstantDrafter()
    drafter = LinkDrafter(link, SPEC, fallback, clock=clock)
    drafter.close_reqs(iter([ReqId("r0")]))
    assert link.closed == fallback.closed == [ReqId("r0")]
    drafter.shutdown()
    assert not link.is_up


def test_a_breaker_opens_after_failures_in_a_row_and_doubles_its_pauses() -> None:
    breaker = CircuitBreaker(max_failures=2, first_pause_s=1.0, max_pause_s=3.0)
    breaker.record_failure(0.0)
    assert breaker.allows(0.0)
    breaker.record_failure(0.0)
    for now_s, pause_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 3.0), (30.0, 3.0)):
        if now_s:
            breaker.record_failure(now_s)
        assert not breaker.allows(now_s + pause_s - 0.01)
        assert breaker.allows(now_s + pause_s)
    breaker.record_success()
    assert breaker.allows(0.0)
