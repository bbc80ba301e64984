"""Dispatch: waiting reqs x group loads -> which req leaves for which group now. Pure.

Late binding: a req leaves only for a group that reported room for it, in pages, seats and prompt
tokens, and the room is charged as reqs are assigned. What finds no room waits for the next report.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.cluster.scheduling.req_queue import WaitingReq, sort_waiting
from paceline.worker.spec.drafter import DraftHealth
from paceline.worker.step import ReqId

__all__ = ["Assignment", "DispatchPolicy", "GroupLoad", "WaitingReq", "dispatch", "hash_prefix"]

_PREFIX_TOKENS = 64
_PREFIX_STEP = 16


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """What a group reports of itself, as ReportRequest has it, and what is known of it."""

    group_id: str
    page_size: int
    num_pages: int
    num_free_pages: int  # evictable prefix pages counted as free
    num_running_reqs: int
    num_waiting_reqs: int
    max_num_reqs: int
    num_pending_prefill_tokens: int = 0  # accepted but not yet computed
    draining: bool = False
    address: str = ""  # host:port of the leader's gRPC listener
    step_id: int = 0
    epoch: int = 0
    req_ids: tuple[ReqId, ...] = ()
    draft: DraftHealth | None = None  # of a group that has, or had, a draft
    # Prefixes the controller sent there lately; the group does not report them.
    prefix_hashes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DispatchPolicy:
    # A req that waited this long goes before all others, and if no group has room, one is kept
    # free of newcomers until it has.
    max_wait_s: float = 30.0
    # Output tokens a req is charged for at most: more pages than these are the group's own affair.
    num_output_tokens_charged: int = 256
    # Prompt tokens a group may have to compute; one req is let in over it when there are none.
    max_pending_prefill_tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class Assignment:
    req_id: ReqId
    group_id: str


def dispatch(
    waiting: Iterable[WaitingReq],
    loads: Sequence[GroupLoad],
    now_s: float,
    policy: DispatchPolicy | None = None,
) -> list[Assignment]:
    """Assigns what fits now, in order of rank; a req past its deadline is left to its owner.

    Args:
        waiting: every waiting req; `deadline_s` and `arrival_s` are on the clock of `now_s`.
        loads: the latest report of each group, with what was sent there since already charged.
    """
    policy = policy or DispatchPolicy()
    groups = [_Room(load) for load in loads if not load.draining]
    known = {prefix for load in loads for prefix in load.prefix_hashes} - {0}
    assignments: list[Assignment] = []
    for req in sort_waiting(waiting, now_s, max_wait_s=policy.max_wait_s, known_prefixes=known):
        if req.deadline_s is not None and req.deadline_s <= now_s:
            continue
        best = _best_for(req, [group for group in groups if group.has_room(req, policy)])
        if best is not None:
            best.charge(req, policy)
            assignments.append(Assignment(req.req_id, best.load.group_id))
        elif now_s - req.arrival_s >= policy.max_wait_s:
            _keep_one_for(req, groups)
    return assignments


def hash_prefix(prompt_ids: Sequence[int]) -> int:
    """64 bits of a prompt's first tokens, so that reqs which begin alike meet in one group's cache.

    Of 64 tokens, a multiple of every page size; of as many whole 16s as a shorter prompt has. 0
    when it has none: it is worth no group's while.
    """
    num_ids = min(len(prompt_ids), _PREFIX_TOKENS) // _PREFIX_STEP * _PREFIX_STEP
    if num_ids == 0:
        return 0
    data = array("q", prompt_ids[:num_ids]).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _keep_one_for(req: WaitingReq, groups: list["_Room"]) -> None:
    """Closes the likeliest group to newcomers for this round, so that a starved req gets in."""
    fitting = [group for group in groups if not group.is_kept and group.could_ever_hold(req)]
    best = _best_for(req, fitting)
    if best is not None:
        best.is_kept = True


def _best_for(req: WaitingReq, groups: Iterable["_Room"]) -> "_Room | None":
    return min(groups, key=lambda group: group.rank(req), default=None)


class _Room:
    """What is left of one group while a round assigns."""

    def __init__(self, load: GroupLoad) -> None:
        self.load = load
        self.is_kept = False
        self._num_free_seats = load.max_num_reqs - load.num_running_reqs - load.num_waiting_reqs
        self._num_pending_tokens = load.num_pending_prefill_tokens
        # Prompts accepted there and not yet computed will take pages that still count as free.
        self._num_free_pages = load.num_free_pages - self._pages_for(self._num_pending_tokens)

    def has_room(self, req: WaitingReq, policy: DispatchPolicy) -> bool:
        if self.is_kept or self._num_free_seats < 1:
            return False
        if self._num_pages_charged(req, policy) > self._num_free_pages:
            return False
        num_tokens = self._num_pending_tokens + req.num_prompt_tokens
        return self._num_pending_tokens == 0 or num_tokens <= policy.max_pending_prefill_tokens

    def could_ever_hold(self, req: WaitingReq) -> bool:
        return self._pages_for(req.num_prompt_tokens + 1) <= self.load.num_pages

    def charge(self, req: WaitingReq, policy: DispatchPolicy) -> None:
        self._num_free_seats -= 1
        self._num_free_pages -= self._num_pages_charged(req, policy)
        self._num_pending_tokens += req.num_prompt_tokens

    def rank(self, req: WaitingReq) -> tuple[bool, int, float, str]:
        """Smaller is better: knows the prefix, least to compute, most pages free, id."""
        is_unknown = req.prefix_hash == 0 or req.prefix_hash not in self.load.prefix_hashes
        free_share = self._num_free_pages / max(self.load.num_pages, 1)
        return (is_unknown, self._num_pending_tokens, -free_share, self.load.group_id)

    def _num_pages_charged(self, req: WaitingReq, policy: DispatchPolicy) -> int:
        num_output_tokens = min(req.max_tokens, policy.num_output_tokens_charged)
        num_pages = self._pages_for(req.num_prompt_tokens + num_output_tokens)
        if num_pages > self.load.num_pages and self.could_ever_hold(req):
            return self.load.num_pages  # it fits, alone, with less output than that
        return num_pages

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.load.page_size)
