"""ControllerState by example: late binding, bounds, repeats, pairing and epochs."""

from dataclasses import replace

import pytest

from paceline.cluster.controller.events import (
    Action,
    Assign,
    AttachDraft,
    DrainBegan,
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
from paceline.cluster.controller.state import (
    LEASE_S,
    MAX_FAILED_STARTS,
    REPORT_TIMEOUT_S,
    ControllerState,
)
from paceline.cluster.scheduling.admission import AdmissionLimits
from paceline.cluster.scheduling.dispatch import GroupLoad, WaitingReq
from paceline.worker.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from paceline.worker.step import ReqId


def load(group: str = "t0", **changes: object) -> GroupLoad:
    base = GroupLoad(
        group_id=group,
        page_size=16,
        num_pages=100,
        num_free_pages=100,
        num_running_reqs=0,
        num_waiting_reqs=0,
        max_num_reqs=4,
        address=f"{group}:1",
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # fields of it


def req(name: str, **changes: object) -> WaitingReq:
    base = WaitingReq(ReqId(name), num_prompt_tokens=16, max_tokens=16)
    return replace(base, **changes)  # type: ignore[arg-type]  # fields of it


def bring_up(state: ControllerState, group: str = "t0", role: str = "target") -> list[Action]:
    state.handle(GroupStarting(group, role, 1), 0.0)  # type: ignore[arg-type]  # a Role
    actions = state.handle(GroupReady(group, f"{group}:1"), 0.0)
    if role == "target":
        actions += state.handle(GroupReported(load(group)), 0.0)
    return actions


@pytest.fixture
def state() -> ControllerState:
    return ControllerState(AdmissionLimits(max_waiting_reqs=2, max_waiting_prompt_tokens=1000))


def test_req_waits_until_a_group_has_room_then_leaves(state: ControllerState) -> None:
    assert state.handle(ReqSubmitted(req("a", arrival_s=1.0)), 1.0) == []
    assert state.num_queued_reqs == 1
    actions = bring_up(state)
    assert actions == [Assign(ReqId("a"), "t0", "t0:1", queue_s=0.0)]
    assert (state.num_queued_reqs, state.num_sent_reqs) == (0, 1)


def test_what_was_sent_since_the_last_report_is_charged(state: ControllerState) -> None:
    bring_up(state)  # seats for 4
    sent = [state.handle(ReqSubmitted(req(str(i))), 1.0) for i in range(5)]
    assert [len(actions) for actions in sent] == [1, 1, 1, 1, 0]
    # The report holds two of them; the others are on their way and still take their seats.
    held = load(num_running_reqs=2, req_ids=(ReqId("0"), ReqId("1")))
    assert state.handle(GroupReported(held), 1.1) == []
    (action,) = state.handle(ReqReleased(ReqId("2")), 1.2)
    assert action == Assign(ReqId("4"), "t0", "t0:1", queue_s=1.2)


def test_queue_over_its_bound_refuses_at_once_with_a_time_to_come_back(
    state: ControllerState,
) -> None:
    for name in "ab":
        assert state.handle(ReqSubmitted(req(name)), 0.0) == []
    (refused,) = state.handle(ReqSubmitted(req("c")), 0.0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, Overloaded)
    assert refused.error.retry_after_s > 0
    assert "2" in refused.error.message


def test_deadline_passed_in_the_queue_is_refused_and_leaves_it(state: ControllerState) -> None:
    state.handle(ReqSubmitted(req("a", deadline_s=5.0)), 0.0)
    assert state.handle(Tick(), 4.9) == []
    (refused,) = state.handle(Tick(), 5.0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, DeadlineExceeded)
    assert refused.error.phase == "queue"
    assert bring_up(state) == []


def test_repeat_of_a_waiting_req_keeps_its_place_and_of_a_sent_one_its_group(
    state: ControllerState,
) -> None:
    state.handle(ReqSubmitted(req("a")), 0.0)
    assert state.handle(ReqSubmitted(req("a")), 0.0) == []
    assert state.num_queued_reqs == 1
    bring_up(state)
    (again,) = state.handle(ReqSubmitted(req("a")), 1.0)
    assert again == Assign(ReqId("a"), "t0", "t0:1", queue_s=0.0)
    assert state.num_sent_reqs == 1


def test_req_of_a_silent_group_is_queued_again_when_its_front_asks(state: ControllerState) -> None:
    bring_up(state)
    state.handle(ReqSubmitted(req("a")), 0.0)
    state.handle(GroupSilent("t0", "t0:1"), 1.0)
    assert state.handle(ReqSubmitted(req("a")), 1.0) == []
    assert state.num_queued_reqs == 1
    (action,) = state.handle(GroupReported(load()), 2.0)
    assert isinstance(action, Assign)


def test_group_not_heard_of_for_long_gets_nothing(state: ControllerState) -> None:
    bring_up(state)
    assert state.handle(ReqSubmitted(req("a")), REPORT_TIMEOUT_S + 0.1) == []
    assert len(state.handle(GroupReported(load()), REPORT_TIMEOUT_S + 0.2)) == 1


def test_dead_group_forgets_its_reqs_and_is_not_believed_any_more(state: ControllerState) -> None:
    bring_up(state)
    state.handle(ReqSubmitted(req("a")), 0.0)
    state.handle(GroupDied("t0"), 1.0)
    assert state.num_sent_reqs == 0
    state.handle(GroupReported(load()), 1.1)  # its last words, late
    assert state.handle(ReqSubmitted(req("a")), 1.2) == []
    assert state.groups[0].status == "dead"


def test_req_that_its_group_no_longer_holds_is_forgotten(state: ControllerState) -> None:
    bring_up(state)
    state.handle(ReqSubmitted(req("a")), 0.0)
    state.handle(GroupReported(load(num_running_reqs=1, req_ids=(ReqId("a"),))), 0.1)
    state.handle(GroupReported(load()), 0.2)
    assert state.num_sent_reqs == 0


def test_req_that_never_reached_its_group_is_forgotten_after_its_lease(
    state: ControllerState,
) -> None:
    bring_up(state)
    state.handle(ReqSubmitted(req("a")), 0.0)
    state.handle(GroupReported(load()), LEASE_S - 0.1)
    assert state.num_sent_reqs == 1
    state.handle(GroupReported(load()), LEASE_S + 0.1)
    assert state.num_sent_reqs == 0


def test_prompt_that_no_group_could_ever_hold_is_refused(state: ControllerState) -> None:
    bring_up(state)
    (refused,) = state.handle(ReqSubmitted(req("a", num_prompt_tokens=1600)), 0.0)
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, InvalidRequest)
    assert "1600" in refused.error.message


def test_draining_group_gets_nothing(state: ControllerState) -> None:
    bring_up(state)
    state.handle(GroupReported(load(draining=True)), 0.1)
    assert state.groups[0].status == "draining"
    assert state.handle(ReqSubmitted(req("a")), 0.2) == []


def test_drain_refuses_the_waiting_and_the_new(state: ControllerState) -> None:
    state.handle(ReqSubmitted(req("a")), 0.0)
    (refused,) = state.handle(DrainBegan(), 1.0)
    (also,) = state.handle(ReqSubmitted(req("b")), 1.0)
    for action in (refused, also):
        assert isinstance(action, Refuse)
        assert isinstance(action.error, Unavailable)


def test_equal_prefixes_go_to_one_group(state: ControllerState) -> None:
    bring_up(state, "t0")
    bring_up(state, "t1")
    groups = set()
    for i in range(3):
        (action,) = state.handle(ReqSubmitted(req(str(i), prefix_hash=7)), 0.0)
        assert isinstance(action, Assign)
        groups.add(action.group_id)
    assert len(groups) == 1


def test_draft_is_paired_whichever_comes_first(state: ControllerState) -> None:
    assert bring_up(state, "t0") == []
    assert bring_up(state, "d0", "draft") == [AttachDraft("t0", "t0:1", "d0", "d0:1", 1)]
    assert bring_up(state, "t1") == [AttachDraft("t1", "t1:1", "d0", "d0:1", 1)]


def test_restarted_draft_is_attached_with_a_higher_epoch(state: ControllerState) -> None:
    bring_up(state, "t0")
    bring_up(state, "d0", "draft")
    # The link has come up again twice by itself meanwhile.
    state.handle(GroupReported(load(epoch=3)), 1.0)
    assert state.handle(GroupDied("d0"), 2.0) == []
    assert state.groups[0].draft_group_id == ""
    (attach,) = bring_up(state, "d0", "draft")
    assert isinstance(attach, AttachDraft)
    assert attach.epoch == 4


def test_rebuilt_target_is_attached_with_a_higher_epoch(state: ControllerState) -> None:
    bring_up(state, "d0", "draft")
    bring_up(state, "t0")
    state.handle(GroupDied("t0"), 1.0)
    attaches = [a for a in bring_up(state, "t0") if isinstance(a, AttachDraft)]
    assert [a.epoch for a in attaches] == [2]


def test_targets_of_a_dead_draft_move_to_a_living_one_and_back(state: ControllerState) -> None:
    for group in ("t0", "t1"):
        bring_up(state, group)
    for group in ("d0", "d1"):
        bring_up(state, group, "draft")
    assert {g.draft_group_id for g in state.groups if g.role == "target"} == {"d0", "d1"}
    (moved,) = state.handle(GroupDied("d0"), 1.0)
    assert isinstance(moved, AttachDraft)
    assert moved.draft_group_id == "d1"
    (back,) = bring_up(state, "d0", "draft")
    assert isinstance(back, AttachDraft)
    assert back.draft_group_id == "d0"
    assert {g.draft_group_id for g in state.groups if g.role == "target"} == {"d0", "d1"}


@pytest.mark.parametrize("dead", ["t0", "d0"])
def test_a_pairing_is_over_when_either_side_dies(state: ControllerState, dead: str) -> None:
    bring_up(state)
    (pairing,) = [a for a in bring_up(state, "d0", "draft") if isinstance(a, AttachDraft)]
    assert state.is_paired(pairing)
    state.handle(GroupDied(dead), 1.0)
    assert not state.is_paired(pairing)
    bring_up(state, dead, "target" if dead == "t0" else "draft")
    assert not state.is_paired(pairing)  # the next one has its own epoch


def fail_starts(state: ControllerState, group: str, num: int) -> list[Action]:
    actions: list[Action] = []
    for _ in range(num):
        state.handle(GroupStarting(group, "target", 1), 1.0)
        actions += state.handle(GroupDied(group, "no such model", was_starting=True), 1.0)
    return actions


def test_reqs_are_refused_with_the_cause_once_no_target_can_start(state: ControllerState) -> None:
    bring_up(state)
    state.handle(GroupDied("t0", "killed"), 1.0)
    state.handle(ReqSubmitted(req("waiting")), 1.0)
    assert fail_starts(state, "t0", MAX_FAILED_STARTS - 1) == []
    (refused,) = fail_starts(state, "t0", 1)
    state.handle(GroupStarting("t0", "target", 1), 1.0)  # the next try changes nothing yet
    (at_once,) = state.handle(ReqSubmitted(req("new")), 1.0)
    for action, name in ((refused, "waiting"), (at_once, "new")):
        assert isinstance(action, Refuse)
        assert action.req_id == name
        assert isinstance(action.error, Unavailable)
        assert "t0 did not start 3 times: no such model" in str(action.error)
    assert state.num_queued_reqs == 0
    bring_up(state)
    assert isinstance(state.handle(ReqSubmitted(req("later")), 1.0)[0], Assign)
    assert state.groups[0].last_error == "no such model"


def test_reqs_wait_while_another_target_may_still_start(state: ControllerState) -> None:
    state.handle(GroupStarting("t1", "target", 1), 0.0)
    state.handle(ReqSubmitted(req("a")), 0.0)
    assert fail_starts(state, "t0", MAX_FAILED_STARTS) == []
    assert state.num_queued_reqs == 1
