"""A front's stream to one leader: orders go out, tokens come in, any number of runs share it.

Knows no text and no retry. What nobody reads is bounded by the run's max_tokens.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from copy import copy

import grpc

from paceline.cluster.front.channels import ChannelCache
from paceline.cluster.front.errors import Cancelled, from_rpc_error, from_status, is_ours
from paceline.protos.v1 import group_pb2
from paceline.protos.v1.group_pb2_grpc import GroupServiceStub
from paceline.worker.errors import (
    DeadlineExceeded,
    InternalError,
    PacelineError,
    Unavailable,
)

log = logging.getLogger(__name__)

# What gRPC itself may answer, beside UNAVAILABLE, when the process behind a connection dies.
_LOST_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class LeaderRun:
    """One request at its leader, and what came of it that nobody has read yet."""

    __slots__ = (
        "_end",
        "_error",
        "_is_woken",
        "_number",
        "_stream",
        "_timer",
        "_token_ids",
        "_waiter",
    )

    def __init__(self, stream: "LeaderStream", number: int, time_left_s: float) -> None:
        self._stream = stream
        self._number = number
        self._token_ids: list[int] = []
        self._end: group_pb2.ReqEnd | None = None
        self._error: PacelineError | None = None
        self._is_woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(
            time_left_s, self.fail, DeadlineExceeded("the request's time is over")
        )

    async def read(self) -> tuple[list[int], group_pb2.ReqEnd | None] | None:
        """New tokens since the last call, and the end if it came; None once woken up.

        For one reader. Raises, once the tokens before it were read: PacelineError: the leader
        refused the request or ended it early, or its time is over; Unavailable: the leader was
        lost.
        """
        while not self._is_woken:
            token_ids, end = self._token_ids, self._end
            if token_ids or end is not None:
                self._token_ids, self._end = [], None
                return token_ids, end
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return None

    def wake(self) -> None:
        """`read` answers None from now on."""
        self._is_woken = True
        self._notify()

    def abort(self) -> None:
        """Asks the leader for its end, which will be read; one it never saw is over."""
        if self._end is None and self._error is None and not self._stream.abort(self._number):
            self.wake()

    def close(self) -> None:
        """Ends it at the leader too, if it runs there still. Idempotent."""
        self._timer.cancel()
        self._stream.drop(self._number)

    def put_tokens(self, token_ids: list[int]) -> None:
        if self._token_ids:
            self._token_ids += token_ids
        else:
            self._token_ids = token_ids
        self._notify()

    def put_end(self, end: group_pb2.ReqEnd) -> None:
        if end.error:
            self.fail(from_status(end.error))
        else:
            self._end = end
            self._notify()

    def fail(self, error: PacelineError) -> None:
        if self._error is None:
            self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LeaderStream:
    """Opened at once; whatever ends it fails its runs, and it is of no use then.

    Args:
        on_end: called once it takes no more runs.
    """

    def __init__(
        self, address: str, channels: ChannelCache, on_end: Callable[["LeaderStream"], None]
    ) -> None:
        self.address = address
        self._channels = channels
        self._on_end = on_end
        self._num_started = 0
        self._runs: dict[int, LeaderRun] = {}
        self._starts: dict[int, group_pb2.StartReq] = {}  # not sent yet
        self._aborts: list[int] = []  # not sent yet
        self._has_orders = asyncio.Event()
        self._has_ended = False
        self._task = asyncio.create_task(self._serve(), name=f"leader-stream-{address}")

    def start(self, request: group_pb2.StartReq, *, time_left_s: float) -> LeaderRun:
        """`request` without its number. Not after the end."""
        assert not self._has_ended
        self._num_started += 1
        number = request.number = self._num_started
        run = self._runs[number] = LeaderRun(self, number, time_left_s)
        self._starts[number] = request
        self._has_orders.set()
        return run

    def abort(self, number: int) -> bool:
        """False where the leader has no such run, and is not asked."""
        if self._starts.pop(number, None) is not None or number not in self._runs:
            return False
        self._aborts.append(number)
        self._has_orders.set()
        return True

    def drop(self, number: int) -> None:
        """As `abort`, and nothing more is wanted of it."""
        self.abort(number)
        self._runs.pop(number, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _serve(self) -> None:
        error: PacelineError = Unavailable(f"the leader at {self.address} ended its stream")
        try:
            async with self._channels.use(self.address) as channel:
                async for response in GroupServiceStub(channel).Run(self._orders()):
                    self._hand_out(response)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            is_lost = not is_ours(rpc_error) and rpc_error.code() in _LOST_CODES
            if is_lost or isinstance(error, Cancelled):  # by a leader that stops: not by us
                error = Unavailable(error.message)
        except Exception:
            log.exception("stream failed address=%s", self.address)
            error = InternalError(f"the stream to the leader at {self.address} failed")
        finally:
            self._has_ended = True
            self._has_orders.set()  # ends the orders
            self._on_end(self)
            for run in self._runs.values():
                run.fail(copy(error))
            self._runs.clear()

    def _hand_out(self, response: group_pb2.RunResponse) -> None:
        """A number without a run is one of which nothing more is wanted."""
        token_ids = list(response.token_ids)
        start = 0
        for number, num_tokens in zip(response.numbers, response.num_tokens, strict=True):
            run = self._runs.get(number)
            if run is not None:
                run.put_tokens(token_ids[start : start + num_tokens])
            start += num_tokens
        for end in response.ends:
            run = self._runs.pop(end.number, None)
            if run is not None:
                run.put_end(end)

    async def _orders(self) -> AsyncIterator[group_pb2.RunRequest]:
        """All that waits, in one message."""
        while True:
            await self._has_orders.wait()
            self._has_orders.clear()
            if self._has_ended:
                return
            request = group_pb2.RunRequest(aborts=self._aborts, starts=self._starts.values())
            self._aborts.clear()
            self._starts.clear()
            yield request
