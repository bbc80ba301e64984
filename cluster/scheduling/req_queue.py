"""ReqQueue: reqs that wait, and in which order they leave. Pure.

It serves the controller's one queue as well as the short one inside a group. Time is an argument.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from paceline.worker.step import ReqId


@dataclass(frozen=True, slots=True)
class WaitingReq:
    """What scheduling knows of a req that waits. All times are seconds of one clock."""

    req_id: ReqId
    num_prompt_tokens: int  # tokens to compute before the first new one, earlier output included
    max_tokens: int
    priority: int = 0  # higher first
    deadline_s: float | None = None
    prefix_hash: int = 0  # of the first tokens of the prompt; 0 means unknown
    arrival_s: float = 0.0


def sort_waiting(
    reqs: Iterable[WaitingReq],
    now_s: float,
    *,
    max_wait_s: float,
    known_prefixes: Collection[int] = (),
) -> list[WaitingReq]:
    """First come those that waited `max_wait_s` or longer, by arrival: nobody starves.

    Then by priority, deadline, whether a group knows the prefix, arrival; the id breaks ties.
    """

    def key(req: WaitingReq) -> tuple[bool, int, float, bool, float, str]:
        if now_s - req.arrival_s >= max_wait_s:
            return (False, 0, 0.0, False, req.arrival_s, req.req_id)
        deadline_s = float("inf") if req.deadline_s is None else req.deadline_s
        is_unknown = req.prefix_hash not in known_prefixes
        return (True, -req.priority, deadline_s, is_unknown, req.arrival_s, req.req_id)

    return sorted(reqs, key=key)


class ReqQueue:
    """Waiting reqs by id, with the totals that admission asks for."""

    def __init__(self) -> None:
        self._reqs: dict[ReqId, WaitingReq] = {}
        self._num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[WaitingReq]:
        """In the order of `push`."""
        return iter(self._reqs.values())

    def __contains__(self, req_id: object) -> bool:
        return req_id in self._reqs

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    def push(self, req: WaitingReq) -> None:
        assert req.req_id not in self._reqs, f"req {req.req_id} waits already"
        self._reqs[req.req_id] = req
        self._num_prompt_tokens += req.num_prompt_tokens

    def remove(self, req_id: ReqId) -> WaitingReq | None:
        """Takes a req out; None when it does not wait."""
        req = self._reqs.pop(req_id, None)
        if req is not None:
            self._num_prompt_tokens -= req.num_prompt_tokens
        return req

    def expired(self, now_s: float) -> list[ReqId]:
        """Reqs whose deadline has passed."""
        return [
            req.req_id
            for req in self._reqs.values()
            if req.deadline_s is not None and req.deadline_s <= now_s
        ]
