"""Admission: accept a req, let it wait, or refuse it at once with a time to come back. Pure."""

import math
from dataclasses import dataclass
from enum import Enum

from paceline.worker.errors import Overloaded


class Verdict(Enum):
    ACCEPT = "accept"  # nobody waits and there is room: it runs next
    QUEUE = "queue"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much may wait. Both bounds count what waits already and the newcomer."""

    max_waiting_reqs: int = 1024
    max_waiting_prompt_tokens: int = 4_000_000
    min_retry_after_s: float = 0.5
    max_retry_after_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    retry_after_s: float = 0.0
    reason: str = ""

    def raise_if_refused(self) -> None:
        """Raises Overloaded: the verdict is REFUSE."""
        if self.verdict is Verdict.REFUSE:
            raise Overloaded(self.reason, self.retry_after_s)


def admit(
    num_prompt_tokens: int,
    *,
    num_waiting_reqs: int,
    num_waiting_prompt_tokens: int,
    has_room: bool,
    limits: AdmissionLimits,
    reqs_per_s: float = 0.0,
) -> Admission:
    """Judges one newcomer.

    Args:
        num_waiting_reqs: reqs that wait now; their prompts have `num_waiting_prompt_tokens`.
        has_room: whether some group could begin with it now.
        reqs_per_s: how fast the queue has been emptying; 0 when unknown. It sets `retry_after_s`,
            the time until half of the queue is gone.
    """
    if num_waiting_reqs == 0 and has_room:
        return Admission(Verdict.ACCEPT)
    reason = ""
    if num_waiting_reqs + 1 > limits.max_waiting_reqs:
        reason = (
            f"{num_waiting_reqs} requests wait, the limit is {limits.max_waiting_reqs}; "
            "retry later or add a group"
        )
    elif (
        num_waiting_reqs > 0
        and num_waiting_prompt_tokens + num_prompt_tokens > limits.max_waiting_prompt_tokens
    ):
        # A single prompt over the bound may still wait alone: nothing else would ever let it in.
        reason = (
            f"requests with {num_waiting_prompt_tokens} prompt tokens wait and this one has "
            f"{num_prompt_tokens}, the limit is {limits.max_waiting_prompt_tokens}; "
            "retry later or add a group"
        )
    if not reason:
        return Admission(Verdict.QUEUE)
    return Admission(Verdict.REFUSE, _retry_after_s(num_waiting_reqs, reqs_per_s, limits), reason)


def _retry_after_s(num_waiting_reqs: int, reqs_per_s: float, limits: AdmissionLimits) -> float:
    if reqs_per_s <= 0.0:
        return max(1.0, limits.min_retry_after_s)
    wait_s = num_waiting_reqs / (2.0 * reqs_per_s)
    wait_s = min(max(wait_s, limits.min_retry_after_s), limits.max_retry_after_s)
    return math.ceil(wait_s * 10.0) / 10.0
