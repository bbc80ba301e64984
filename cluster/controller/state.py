"""ControllerState: what the controller knows, and what it decides. Events in, actions out. Pure.

It owns membership, the deployment's one queue, which group holds which req, and the pairing of
targets with drafts and its epochs. It knows no process, no clock and no wire: the shell
(cluster/controller/actor.py) turns what happens into events and does what the actions say.

A req is bound late: it waits in the queue until a group reported room for it. Between two reports
of a group, what was sent there and is not yet in a report is charged against the last one.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.cluster.controller.events import (
    Action,
    Assign,
    AttachDraft,
    DrainBegan,
    Event,
    GroupDied,
    GroupReady,
    GroupReported,
    GroupSilent,
    GroupStarting,
    Refuse,
    ReqReleased,
    ReqSubmitted,
    Role,
    Tick,
)
from paceline.cluster.scheduling.admission import AdmissionLimits, admit
from paceline.cluster.scheduling.dispatch import DispatchPolicy, GroupLoad, WaitingReq, dispatch
from paceline.cluster.scheduling.req_queue import ReqQueue
from paceline.worker.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PacelineError,
    Unavailable,
)
from paceline.worker.step import Epoch, ReqId

_NO_EPOCH = Epoch(0)
GroupStatus = Literal["starting", "ready", "draining", "dead"]

# A group unheard of for this long gets no new reqs; reports come every 0.1 s.
REPORT_TIMEOUT_S = 5.0
# A req sent to a group that the group never reported: its front died between the two calls.
LEASE_S = 15.0
# So many starts of a group that fail one after the other are not bad luck: with no other target
# group up, nobody is made to wait for the next.
MAX_FAILED_STARTS = 3
_MAX_PREFIXES = 1024  # remembered per group
_RATE_WINDOW_S = 10.0


@dataclass(slots=True)
class _Sent:
    """A req that a group was given."""

    req: WaitingReq
    sent_s: float
    queue_s: float
    was_reported: bool = False


@dataclass(slots=True)
class Group:
    """One group as the controller sees it; read only outside this module."""

    group_id: str
    role: Role
    tp_size: int
    status: GroupStatus = "starting"
    address: str = ""
    num_pages: int = 0
    load: GroupLoad | None = None
    reported_s: float = 0.0
    draft_group_id: str = ""
    epoch: Epoch = _NO_EPOCH
    last_error: str = ""  # why it died, or did not start, last
    num_failed_starts: int = 0  # since it was ready
    sent: dict[ReqId, _Sent] = field(default_factory=dict)
    prefixes: "OrderedDict[int, None]" = field(default_factory=OrderedDict)


class ControllerState:
    """Changed by `handle` only."""

    def __init__(
        self, limits: AdmissionLimits | None = None, policy: DispatchPolicy | None = None
    ) -> None:
        self._limits = limits or AdmissionLimits()
        self._policy = policy or DispatchPolicy()
        self._groups: dict[str, Group] = {}
        self._queue = ReqQueue()
        self._holders: dict[ReqId, str] = {}  # req -> group it was sent to
        self._sent_times: deque[float] = deque()
        self._is_draining = False

    @property
    def groups(self) -> list[Group]:
        return sorted(self._groups.values(), key=lambda g: (g.role != "target", g.group_id))

    @property
    def num_queued_reqs(self) -> int:
        return len(self._queue)

    @property
    def num_sent_reqs(self) -> int:
        return len(self._holders)

    def is_paired(self, action: AttachDraft) -> bool:
        """Whether a pairing still holds: both of its leaders live, and no later one was decided."""
        group = self._groups[action.group_id]
        return (group.address, group.draft_group_id, group.epoch) == (
            action.address,
            action.draft_group_id,
            action.epoch,
        )

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Applies one event; `now_s` is on the clock of all deadlines and arrivals."""
        match event:
            case GroupStarting():
                return self._on_starting(event)
            case GroupReady():
                return self._on_ready(event)
            case GroupReported():
                return self._on_reported(event.load, now_s)
            case GroupSilent():
                return self._on_silent(event)
            case GroupDied():
                return self._on_died(event)
            case ReqSubmitted():
                return self._on_submitted(event.req, now_s)
            case ReqReleased():
                self._queue.remove(event.req_id)
                self._forget(event.req_id)
                return self._dispatch(now_s)
            case DrainBegan():
                self._is_draining = True
                return [
                    self._refuse(req.req_id, Unavailable("the deployment is shutting down"))
                    for req in list(self._queue)
                ]
            case Tick():
                return self._on_tick(now_s)

    # ---- membership and pairing

    def _on_starting(self, event: GroupStarting) -> list[Action]:
        known = self._groups.get(event.group_id)
        if known is not None and known.status != "dead":
            return []
        # The epoch outlives the process: an answer of the earlier one must not fit a later one.
        group = Group(event.group_id, event.role, event.tp_size)
        if known is not None:
            group.epoch, group.last_error = known.epoch, known.last_error
            group.num_failed_starts = known.num_failed_starts
        self._groups[event.group_id] = group
        return []

    def _on_ready(self, event: GroupReady) -> list[Action]:
        group = self._groups.get(event.group_id)
        if group is None or group.status != "starting":
            return []
        group.status, group.address, group.num_pages = "ready", event.address, event.num_pages
        group.num_failed_starts = 0
        return self._pair()

    def _on_died(self, event: GroupDied) -> list[Action]:
        group = self._groups.get(event.group_id)
        if group is None:
            return []
        group.status, group.address, group.load = "dead", "", None
        group.last_error = event.reason or group.last_error
        group.num_failed_starts += event.was_starting
        # Their fronts see the streams break and submit again, with what they have received.
        for req_id in list(group.sent):
            self._forget(req_id)
        if group.role == "draft":
            for target in self._groups.values():
                if target.draft_group_id == group.group_id:
                    target.draft_group_id = ""
        group.draft_group_id = ""
        if (lost := self._why_lost()) is not None:
            return [self._refuse(req.req_id, lost) for req in list(self._queue)] + self._pair()
        return self._pair()

    def _why_lost(self) -> Unavailable | None:
        """Set while no target group is up and none will be by waiting."""
        targets = [g for g in self.groups if g.role == "target"]
        if not targets or any(
            g.status in ("ready", "draining") or g.num_failed_starts < MAX_FAILED_STARTS
            for g in targets
        ):
            return None
        causes = "; ".join(
            f"{g.group_id} did not start {g.num_failed_starts} times: {g.last_error}"
            for g in targets
        )
        return Unavailable(f"no group of the model is up: {causes}")

    def _pair(self) -> list[Action]:
        """Gives each ready target a ready draft, the least shared one, and evens the shares out."""
        targets = [g for g in self.groups if g.role == "target" and g.status == "ready"]
        drafts = [g.group_id for g in self.groups if g.role == "draft" and g.status == "ready"]
        if not drafts:
            return []
        shares = {draft: [t for t in targets if t.draft_group_id == draft] for draft in drafts}
        changed: list[Group] = []
        for target in targets:
            if target.draft_group_id not in shares:
                draft = min(drafts, key=lambda d: (len(shares[d]), d))
                shares[draft].append(target)
                changed.append(target)
        while True:
            most = max(drafts, key=lambda d: len(shares[d]))
            least = min(drafts, key=lambda d: len(shares[d]))
            if len(shares[most]) - len(shares[least]) < 2:
                break
            target = shares[most].pop()
            shares[least].append(target)
            if target not in changed:
                changed.append(target)
        for draft, members in shares.items():
            for target in members:
                target.draft_group_id = draft
        return [self._attach(target) for target in changed]

    def _attach(self, target: Group) -> AttachDraft:
        # Reports carry the epoch of the pairing that the leader took last, which somebody else may
        # have decided: an operator's AttachDraft. How often its link has reconnected since is not
        # in them, and need not be: no two links share a stream, nor the epochs on it.
        reported = target.load.epoch if target.load is not None else 0
        target.epoch = Epoch(max(target.epoch, reported) + 1)
        draft = self._groups[target.draft_group_id]
        return AttachDraft(
            target.group_id, target.address, draft.group_id, draft.address, target.epoch
        )

    # ---- load

    def _on_reported(self, load: GroupLoad, now_s: float) -> list[Action]:
        group = self._groups.get(load.group_id)
        if group is None or group.address != load.address or not group.address:
            return []  # of a process that is not, or no longer, the group's leader
        group.load, group.reported_s = load, now_s
        group.num_pages = load.num_pages
        group.epoch = Epoch(max(group.epoch, load.epoch))
        group.status = "draining" if load.draining else "ready"
        held = set(load.req_ids)
        for req_id, sent in list(group.sent.items()):
            if req_id in held:
                sent.was_reported = True
            elif sent.was_reported or now_s - sent.sent_s > LEASE_S:
                self._forget(req_id)  # over, and its front's release is late or will never come
        return self._dispatch(now_s)

    def _on_silent(self, event: GroupSilent) -> list[Action]:
        group = self._groups.get(event.group_id)
        if group is not None and group.address == event.address:
            group.load = None
        return []

    def _on_tick(self, now_s: float) -> list[Action]:
        expired: list[Action] = [
            self._refuse(req_id, DeadlineExceeded("the deadline passed in the queue", "queue"))
            for req_id in self._queue.expired(now_s)
        ]
        return expired + self._dispatch(now_s)

    # ---- reqs

    def _on_submitted(self, req: WaitingReq, now_s: float) -> list[Action]:
        if self._is_draining:
            return [Refuse(req.req_id, Unavailable("the deployment is shutting down"))]
        if req.req_id in self._queue:
            return []  # a repeat keeps its place; the shell tells all who ask
        if (again := self._repeat(req)) is not None:
            return [again]
        if req.deadline_s is not None and req.deadline_s <= now_s:
            return [Refuse(req.req_id, DeadlineExceeded("the deadline has passed", "queue"))]
        if (lost := self._why_lost()) is not None:
            return [Refuse(req.req_id, lost)]
        if (too_long := self._refuse_if_hopeless(req)) is not None:
            return [too_long]
        loads = self._loads(now_s)
        admission = admit(
            req.num_prompt_tokens,
            num_waiting_reqs=len(self._queue),
            num_waiting_prompt_tokens=self._queue.num_prompt_tokens,
            has_room=bool(dispatch([req], loads, now_s, self._policy)),
            limits=self._limits,
            reqs_per_s=self._reqs_per_s(now_s),
        )
        try:
            admission.raise_if_refused()
        except Overloaded as error:
            return [Refuse(req.req_id, error)]
        self._queue.push(req)
        return self._dispatch(now_s)

    def _repeat(self, req: WaitingReq) -> Assign | None:
        """The answer to a req that a group was given already, if the group still speaks."""
        group = self._groups.get(self._holders.get(req.req_id, ""))
        if group is None:
            return None
        if group.load is None or group.status != "ready":
            self._forget(req.req_id)
            return None
        sent = group.sent[req.req_id]
        return Assign(req.req_id, group.group_id, group.address, sent.queue_s)

    def _refuse_if_hopeless(self, req: WaitingReq) -> Refuse | None:
        loads = [g.load for g in self._groups.values() if g.role == "target" and g.load]
        if not loads:
            return None
        most = max(load.num_pages * load.page_size for load in loads)
        if req.num_prompt_tokens + 1 <= most:
            return None
        text = (
            f"the request holds {req.num_prompt_tokens} tokens, the KV cache of a group holds "
            f"{most} with one to generate; shorten it or give the cache more memory"
        )
        return Refuse(req.req_id, InvalidRequest(text, "prompt"))

    def _dispatch(self, now_s: float) -> list[Action]:
        if not len(self._queue):
            return []
        actions: list[Action] = []
        for chosen in dispatch(self._queue, self._loads(now_s), now_s, self._policy):
            req = self._queue.remove(chosen.req_id)
            assert req is not None, f"dispatch named {chosen.req_id}, which does not wait"
            actions.append(self._send(req, self._groups[chosen.group_id], now_s))
        return actions

    def _send(self, req: WaitingReq, group: Group, now_s: float) -> Assign:
        queue_s = max(0.0, now_s - req.arrival_s)
        group.sent[req.req_id] = _Sent(req, now_s, queue_s)
        self._holders[req.req_id] = group.group_id
        self._sent_times.append(now_s)
        if req.prefix_hash:
            group.prefixes[req.prefix_hash] = None
            group.prefixes.move_to_end(req.prefix_hash)
            if len(group.prefixes) > _MAX_PREFIXES:
                group.prefixes.popitem(last=False)
        return Assign(req.req_id, group.group_id, group.address, queue_s)

    def _refuse(self, req_id: ReqId, error: PacelineError) -> Refuse:
        self._queue.remove(req_id)
        return Refuse(req_id, error)

    def _forget(self, req_id: ReqId) -> None:
        group_id = self._holders.pop(req_id, None)
        if group_id is not None:
            del self._groups[group_id].sent[req_id]

    def _loads(self, now_s: float) -> list[GroupLoad]:
        """The groups that may be given a req, each charged with what it has not reported yet."""
        return [
            self._charged(group, group.load)
            for group in self.groups
            if group.role == "target"
            and group.status == "ready"
            and group.load is not None
            and now_s - group.reported_s <= REPORT_TIMEOUT_S
        ]

    def _charged(self, group: Group, load: GroupLoad) -> GroupLoad:
        unseen = [sent.req for sent in group.sent.values() if not sent.was_reported]
        most = self._policy.num_output_tokens_charged
        num_output_tokens = sum(min(req.max_tokens, most) for req in unseen)
        return replace(
            load,
            num_waiting_reqs=load.num_waiting_reqs + len(unseen),
            # Pages of the prompts are taken off by dispatch, with all pending prefill.
            num_pending_prefill_tokens=load.num_pending_prefill_tokens
            + sum(req.num_prompt_tokens for req in unseen),
            num_free_pages=load.num_free_pages - num_output_tokens // load.page_size - len(unseen),
            prefix_hashes=frozenset(group.prefixes),
        )

    def _reqs_per_s(self, now_s: float) -> float:
        while self._sent_times and now_s - self._sent_times[0] > _RATE_WINDOW_S:
            self._sent_times.popleft()
        return len(self._sent_times) / _RATE_WINDOW_S
