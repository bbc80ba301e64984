"""Whatever happens in whatever order: no req is lost, doubled or sent where there is no room."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cluster.controller.events import (
    Action,
    Assign,
    AttachDraft,
    Event,
    GroupDied,
    GroupReady,
    GroupReported,
    GroupSilent,
    GroupStarting,
    Refuse,
    ReqReleased,
    ReqSubmitted,
    Tick,
)
from paceline.cluster.controller.state import ControllerState
from paceline.cluster.scheduling.admission import AdmissionLimits
from paceline.cluster.scheduling.dispatch import GroupLoad, WaitingReq
from paceline.worker.step import ReqId

SEATS = 3
PAGES = 12
PAGE_SIZE = 16
MAX_WAITING = 4
TARGETS = ("t0", "t1")
DRAFTS = ("d0", "d1")


@dataclass
class FakeGroup:
    """A target group that runs what it was given."""

    address: str
    reqs: dict[ReqId, WaitingReq] = field(default_factory=dict)

    def pages_of(self, req: WaitingReq) -> int:
        return -(-(req.num_prompt_tokens + req.max_tokens) // PAGE_SIZE)

    def load(self, group_id: str) -> GroupLoad:
        used = sum(map(self.pages_of, self.reqs.values()))
        return GroupLoad(
            group_id=group_id,
            page_size=PAGE_SIZE,
            num_pages=PAGES,
            num_free_pages=PAGES - used,
            num_running_reqs=len(self.reqs),
            num_waiting_reqs=0,
            max_num_reqs=SEATS,
            address=self.address,
            req_ids=tuple(self.reqs),
        )


class Deployment(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = ControllerState(AdmissionLimits(MAX_WAITING, 10_000))
        self.now_s = 0.0
        self.num_lives = 0
        self.groups: dict[str, FakeGroup] = {}
        self.drafts: dict[str, str] = {}  # live draft -> address
        self.asked: dict[ReqId, WaitingReq] = {}  # whose callers wait for an answer
        self.epochs: Counter[str] = Counter()
        self.pairs: dict[str, str] = {}
        self.num_reqs = 0

    def handle(self, event: Event) -> None:
        for action in self.state.handle(event, self.now_s):
            self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case Assign():
                req = self.asked.pop(action.req_id)  # answered once, and only if somebody asked
                group = self.groups[action.group_id]
                assert group.address == action.address, "sent to a process that is gone"
                group.reqs[action.req_id] = req
                assert len(group.reqs) <= SEATS, "sent where no seat is free"
                assert sum(map(group.pages_of, group.reqs.values())) <= PAGES
            case Refuse():
                self.asked.pop(action.req_id)
            case AttachDraft():
                assert action.epoch > self.epochs[action.group_id], "an epoch came twice"
                self.epochs[action.group_id] = action.epoch
                assert self.drafts[action.draft_group_id] == action.draft_address
                self.pairs[action.group_id] = action.draft_group_id

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.handle(Tick())

    @rule(group_id=st.sampled_from(TARGETS))
    def start_target(self, group_id: str) -> None:
        if group_id in self.groups:
            return
        self.num_lives += 1
        address = f"{group_id}:{self.num_lives}"
        self.groups[group_id] = FakeGroup(address)
        self.handle(GroupStarting(group_id, "target", 1))
        self.handle(GroupReady(group_id, address, PAGES))
        self.handle(GroupReported(self.groups[group_id].load(group_id)))

    @rule(group_id=st.sampled_from(TARGETS))
    def lose_target(self, group_id: str) -> None:
        if self.groups.pop(group_id, None) is not None:
            self.pairs.pop(group_id, None)
            self.handle(GroupDied(group_id))

    @rule(group_id=st.sampled_from(DRAFTS))
    def start_draft(self, group_id: str) -> None:
        if group_id in self.drafts:
            return
        self.num_lives += 1
        self.drafts[group_id] = f"{group_id}:{self.num_lives}"
        self.handle(GroupStarting(group_id, "draft", 1))
        self.handle(GroupReady(group_id, self.drafts[group_id]))

    @rule(group_id=st.sampled_from(DRAFTS))
    def lose_draft(self, group_id: str) -> None:
        if self.drafts.pop(group_id, None) is not None:
            self.pairs = {t: d for t, d in self.pairs.items() if d != group_id}
            self.handle(GroupDied(group_id))

    @rule(
        num_prompt_tokens=st.integers(1, 100),
        max_tokens=st.integers(1, 60),
        priority=st.integers(0, 1),
        patience_s=st.none() | st.sampled_from([0.05, 2.0]),
    )
    def submit(
        self, num_prompt_tokens: int, max_tokens: int, priority: int, patience_s: float | None
    ) -> None:
        self.num_reqs += 1
        req = WaitingReq(
            ReqId(f"r{self.num_reqs}"),
            num_prompt_tokens,
            max_tokens,
            priority,
            None if patience_s is None else self.now_s + patience_s,
            arrival_s=self.now_s,
        )
        self.asked[req.req_id] = req
        self.handle(ReqSubmitted(req))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        self.handle(ReqSubmitted(self.asked[data.draw(st.sampled_from(sorted(self.asked)))]))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave_the_queue(self, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[req_id]
        self.handle(ReqReleased(req_id))

    @rule(group_id=st.sampled_from(TARGETS), with_release=st.booleans(), data=st.data())
    def finish(self, group_id: str, with_release: bool, data: st.DataObject) -> None:
        group = self.groups.get(group_id)
        if group is None or not group.reqs:
            return
        req_id = data.draw(st.sampled_from(sorted(group.reqs)))
        del group.reqs[req_id]
        if with_release:
            self.handle(ReqReleased(req_id))

    @rule(group_id=st.sampled_from(TARGETS))
    def report(self, group_id: str) -> None:
        if (group := self.groups.get(group_id)) is not None:
            self.handle(GroupReported(group.load(group_id)))

    @rule(group_id=st.sampled_from(TARGETS))
    def lose_report_stream(self, group_id: str) -> None:
        if (group := self.groups.get(group_id)) is not None:
            self.handle(GroupSilent(group_id, group.address))

    @invariant()
    def queue_holds_exactly_those_who_wait(self) -> None:
        assert self.state.num_queued_reqs == len(self.asked)
        assert self.state.num_queued_reqs <= MAX_WAITING

    @invariant()
    def every_living_target_has_a_living_draft_if_there_is_one(self) -> None:
        for group in self.state.groups:
            if group.role == "target" and group.group_id in self.groups:
                assert self.pairs.get(group.group_id, "") == group.draft_group_id
                assert bool(group.draft_group_id) == bool(self.drafts)

    def teardown(self) -> None:
        """With groups up, free and reporting, the queue empties."""
        for group_id in TARGETS:
            self.start_target(group_id)
        for _ in range(4 * MAX_WAITING):
            for group_id, group in self.groups.items():
                group.reqs.clear()
                self.handle(GroupReported(group.load(group_id)))
            # The deadlines of the impatient and the leases of those that never arrived run out.
            self.now_s += 20.0
            self.handle(Tick())
        assert not self.asked


TestDeployment = Deployment.TestCase
TestDeployment.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
