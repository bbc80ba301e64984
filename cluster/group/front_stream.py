"""One front's Run stream at a leader: its orders in, what steps bring out, one message a step.

Any number of reqs share it and do not notice one another. When it ends, so do they.
"""

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from itertools import chain
from typing import TYPE_CHECKING

from paceline.cluster.front.errors import to_status
from paceline.cluster.group.req_state import NewReq, ReqEvent
from paceline.cluster.wire import finish_reason_to_pb, receipt_to_pb, sampling_params_from_pb
from paceline.protos.v1 import group_pb2
from paceline.worker.errors import InternalError, InvalidRequest, PacelineError
from paceline.worker.step import ReqId

if TYPE_CHECKING:
    from paceline.cluster.group.inbox import Sink, Wake
    from paceline.cluster.group.step_loop import StepLoop

log = logging.getLogger(__name__)


class FrontStream:
    """Built and used on the event loop's thread; only sinks and `_wake` run on the step thread.

    Bounded: what waits for a slow front is joined by req, whose max_tokens bounds it, and a front
    that does not read its refusals is not listened to.

    Args:
        on_change: called when the load may have changed.
    """

    def __init__(self, loop: "StepLoop", *, group_id: str, on_change: Callable[[], None]) -> None:
        self._loop = loop
        self._group_id = group_id
        self._on_change = on_change
        self._aio_loop = asyncio.get_running_loop()
        self._req_ids: dict[int, ReqId] = {}  # of reqs whose last event has not been sent
        self._events: deque[tuple[int, ReqEvent]] = deque()  # both threads, each at its end
        self._is_woken = asyncio.Event()
        self._are_events_sent = asyncio.Event()
        self._is_closing = False

    async def responses(
        self, requests: AsyncIterator[group_pb2.RunRequest]
    ) -> AsyncGenerator[group_pb2.RunResponse, None]:
        """Until the front ends the stream, or `close_when_idle`.

        Raises: InvalidRequest: a number stands for two reqs.
        """
        reader = asyncio.create_task(self._take_orders(requests))
        reader.add_done_callback(lambda _: self._is_woken.set())
        try:
            while not (reader.done() or (self._is_closing and not self._req_ids)):
                await self._is_woken.wait()
                self._is_woken.clear()
                while self._events:
                    yield self._next_response()
                self._are_events_sent.set()
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            for req_id in self._req_ids.values():
                self._loop.abort(req_id)
            self._on_change()
            # Last: gRPC may cancel a second time, and an await in here would not come back.
            await asyncio.gather(reader, return_exceptions=True)

    def close_when_idle(self) -> None:
        """Ends the stream once its last req has ended."""
        self._is_closing = True
        self._is_woken.set()

    # ---- orders

    async def _take_orders(self, requests: AsyncIterator[group_pb2.RunRequest]) -> None:
        async for request in requests:
            for number in request.aborts:
                req_id = self._req_ids.get(number)
                if req_id is not None:  # else its last event crossed the order
                    self._loop.abort(req_id)
            num_refused = 0
            for start in request.starts:
                if start.number in self._req_ids:
                    raise InvalidRequest(f"two requests have number {start.number}", "number")
                error = self._start(start)
                if error is not None:
                    num_refused += 1
                    refusal = ReqEvent(ReqId(start.req_id), error=error)
                    self._events.append((start.number, refusal))
            self._on_change()
            if num_refused:
                self._is_woken.set()
                self._are_events_sent.clear()
                await self._are_events_sent.wait()

    def _start(self, start: group_pb2.StartReq) -> PacelineError | None:
        """Why the req cannot run here; the others go on."""
        try:
            req = _new_req(start)
            self._loop.submit(req, self._sink(start.number))
        except PacelineError as error:
            return error
        except Exception:
            log.exception("start failed req_id=%s", start.req_id)
            return InternalError("the request could not be started; the leader's log says why")
        self._req_ids[start.number] = req.req_id
        return None

    # ---- events

    def _sink(self, number: int) -> "Sink":
        def sink(event: ReqEvent) -> "Wake":
            self._events.append((number, event))
            return self._wake

        return sink

    def _wake(self) -> None:
        self._aio_loop.call_soon_threadsafe(self._is_woken.set)

    def _next_response(self) -> group_pb2.RunResponse:
        """All that waits, joined by req."""
        new_ids: defaultdict[int, list[int]] = defaultdict(list)
        ends: list[group_pb2.ReqEnd] = []
        while self._events:
            number, event = self._events.popleft()
            if event.new_ids:
                new_ids[number] += event.new_ids
            if event.is_last:
                self._req_ids.pop(number, None)
                ends.append(self._end_of(number, event))
        if ends:
            self._on_change()
        return group_pb2.RunResponse(
            numbers=new_ids,
            num_tokens=map(len, new_ids.values()),
            token_ids=chain.from_iterable(new_ids.values()),
            ends=ends,
        )

    def _end_of(self, number: int, event: ReqEvent) -> group_pb2.ReqEnd:
        end = group_pb2.ReqEnd(number=number, matched_token_id=event.matched_token_id)
        if event.finish_reason is not None:
            end.finish_reason = finish_reason_to_pb(event.finish_reason)
        if event.receipt is not None:
            end.receipt.CopyFrom(receipt_to_pb(event.receipt, group_id=self._group_id))
        if event.error is not None:
            end.error = to_status(event.error).SerializeToString()
        return end


def _new_req(start: group_pb2.StartReq) -> NewReq:
    """Raises: InvalidRequest: not from a front."""
    if not start.req_id:
        raise InvalidRequest("req_id is empty; it must be unique", "req_id")
    try:
        params = sampling_params_from_pb(start.sampling_params)
    except ValueError as error:
        raise InvalidRequest(str(error), "sampling_params") from error
    return NewReq(
        req_id=ReqId(start.req_id),
        prompt_ids=list(start.prompt_ids),
        output_ids=list(start.output_ids),
        params=params,
        priority=start.priority,
        deadline_unix_s=start.deadline_unix_s if start.HasField("deadline_unix_s") else None,
    )
