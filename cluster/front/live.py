"""One request while a front works on it, and the table of them."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.front.answer import Answer
from paceline.cluster.front.leader_stream import LeaderRun
from paceline.cluster.front.requests import ResolvedReq
from paceline.protos.v1 import common_pb2
from paceline.worker.errors import AlreadyExists, Overloaded, PacelineError


@dataclass(slots=True)
class LiveReq:
    req: ResolvedReq
    answer: Answer
    received_s: float  # monotonic
    group_id: str = ""
    address: str = ""  # of the leader that runs it; "" while it waits
    queue_s: float = 0.0
    first_token_s: float | None = None  # monotonic
    last_token_s: float = 0.0  # monotonic
    group_receipt: common_pb2.Receipt = field(default_factory=common_pb2.Receipt)
    # What it waits on: the call that asks for a group, then the run there.
    call: Any = None  # Any: grpc.aio names no common base of its calls with cancel()
    run: LeaderRun | None = None
    num_lost: int = 0  # runs that ended without a token and are tried elsewhere
    is_aborted: bool = False
    has_ended: bool = False  # and was counted in the metrics
    ended_by: PacelineError | None = None

    @property
    def is_ending(self) -> bool:
        return self.is_aborted or self.ended_by is not None

    def wake(self) -> None:
        if self.call is not None:
            self.call.cancel()
        if self.run is not None:
            self.run.wake()

    def was_woken(self) -> bool:
        """Whether a CancelledError that was just caught came from `wake`, not from outside."""
        task = asyncio.current_task()
        return self.is_ending and (task is None or task.cancelling() == 0)


class LiveTable:
    """The requests of one front by id; bounded, and each id once."""

    def __init__(self, max_reqs: int) -> None:
        self._max_reqs = max_reqs
        self._reqs: dict[str, LiveReq] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._reqs)

    def get(self, req_id: str) -> LiveReq | None:
        return self._reqs.get(req_id)

    def all(self) -> list[LiveReq]:
        return list(self._reqs.values())

    def check_room(self, req_id: str) -> None:
        """Raises: AlreadyExists, Overloaded."""
        if req_id in self._reqs:
            raise AlreadyExists(
                f"request '{req_id}' is running; wait for its end, abort it, or use another id"
            )
        if len(self._reqs) >= self._max_reqs:
            raise Overloaded(
                f"this front has {len(self._reqs)} requests, its limit is {self._max_reqs}; retry "
                "later or start another front",
                1.0,
            )

    def add(self, live: LiveReq) -> None:
        self.check_room(live.req.req_id)
        self._reqs[live.req.req_id] = live
        self._idle.clear()

    def remove(self, live: LiveReq) -> None:
        del self._reqs[live.req.req_id]
        if not self._reqs:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether the last request ended in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
