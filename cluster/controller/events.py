"""What happens to a deployment, and what the controller decides upon it. Plain values."""

from dataclasses import dataclass
from typing import Literal

from paceline.cluster.scheduling.dispatch import GroupLoad, WaitingReq
from paceline.worker.errors import PacelineError
from paceline.worker.step import Epoch, ReqId

Role = Literal["target", "draft"]

# ---- events


@dataclass(frozen=True, slots=True)
class GroupStarting:
    group_id: str
    role: Role
    tp_size: int


@dataclass(frozen=True, slots=True)
class GroupReady:
    group_id: str
    address: str  # host:port of its leader
    num_pages: int = 0


@dataclass(frozen=True, slots=True)
class GroupReported:
    load: GroupLoad


@dataclass(frozen=True, slots=True)
class GroupSilent:
    """The leader's report stream broke: perhaps it died, perhaps it calls again."""

    group_id: str
    address: str


@dataclass(frozen=True, slots=True)
class GroupDied:
    group_id: str
    reason: str = ""
    was_starting: bool = False  # it never came up


@dataclass(frozen=True, slots=True)
class ReqSubmitted:
    req: WaitingReq


@dataclass(frozen=True, slots=True)
class ReqReleased:
    req_id: ReqId


@dataclass(frozen=True, slots=True)
class DrainBegan:
    pass


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    GroupStarting
    | GroupReady
    | GroupReported
    | GroupSilent
    | GroupDied
    | ReqSubmitted
    | ReqReleased
    | DrainBegan
    | Tick
)


# ---- actions


@dataclass(frozen=True, slots=True)
class Assign:
    req_id: ReqId
    group_id: str
    address: str
    queue_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    req_id: ReqId
    error: PacelineError


@dataclass(frozen=True, slots=True)
class AttachDraft:
    """Tell a target's leader which draft is its own from now on."""

    group_id: str
    address: str  # of the target's leader
    draft_group_id: str
    draft_address: str
    epoch: Epoch


Action = Assign | Refuse | AttachDraft
