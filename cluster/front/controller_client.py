"""A front's side of ControllerService: finds the controller again when it was restarted."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from paceline.cluster.front.channels import ChannelCache
from paceline.cluster.front.errors import Cancelled, from_rpc_error, is_ours
from paceline.cluster.front.live import LiveReq
from paceline.protos.v1 import controller_pb2
from paceline.protos.v1.controller_pb2_grpc import ControllerServiceStub
from paceline.worker.clock import Clock
from paceline.worker.errors import DeadlineExceeded, PacelineError, Unavailable

if TYPE_CHECKING:
    from paceline.protos.v1.controller_pb2_grpc import ControllerServiceAsyncStub

log = logging.getLogger(__name__)

# Answers host:port of the controller's listener now; raises Unavailable when there is none.
ControllerResolver = Callable[[], Awaitable[str]]

_SHORT_RPC_S = 2.0
_MAX_BACKOFF_S = 1.0


class ControllerClient:
    def __init__(
        self,
        resolve_address: ControllerResolver,
        channels: ChannelCache,
        *,
        wait_s: float,
        clock: Clock,
    ) -> None:
        """`wait_s`: how long a new request waits for a controller that does not answer."""
        self._resolve_address = resolve_address
        self._channels = channels
        self._wait_s = wait_s
        self._clock = clock
        self._address = ""

    async def submit(
        self, live: LiveReq, request: controller_pb2.SubmitRequest
    ) -> controller_pb2.SubmitResponse | None:
        """Waits for a group with room; None when the request was woken up to end.

        Raises: DeadlineExceeded, Overloaded, Unavailable, or what the controller says.
        """
        give_up_s = self._clock.monotonic() + self._wait_s
        backoff_s = 0.05
        while not live.is_ending:
            time_left_s = live.req.deadline_unix_s - self._clock.unix_s()
            if time_left_s <= 0:
                raise queue_deadline(live)
            try:
                async with self._stub() as stub:
                    if live.is_ending:  # since the controller was looked up
                        return None
                    live.call = call = stub.Submit(request, timeout=time_left_s)
                    return await call
            except asyncio.CancelledError:
                if live.was_woken():
                    return None
                raise
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc_error(rpc_error)
                if isinstance(error, DeadlineExceeded):
                    raise queue_deadline(live) from None
                if isinstance(error, Cancelled) and is_ours(rpc_error):
                    live.is_aborted = True  # through another front
                    return None
                if is_ours(rpc_error) or not isinstance(error, Unavailable):
                    raise error from None
                lost = error
            except Unavailable as error:  # nobody to resolve
                lost = error
            finally:
                live.call = None
            self._address = ""
            if self._clock.monotonic() >= give_up_s:
                raise Unavailable(
                    f"the controller did not answer for {self._wait_s:g} s ({lost}); retry later",
                    self._wait_s,
                )
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        return None

    async def release(self, req_id: str, *, abort: bool = False) -> bool:
        """Best effort: a controller that misses it learns from the group's own reports.

        Returns whether `abort` ended it in the queue.
        """
        request = controller_pb2.ReleaseRequest(req_id=req_id, abort=abort)
        try:
            async with self._stub() as stub:
                return (await stub.Release(request, timeout=_SHORT_RPC_S)).found
        except (grpc.aio.AioRpcError, PacelineError) as error:
            log.debug("release not delivered req_id=%s error=%s", req_id, error)
            return False

    async def status(self) -> controller_pb2.GetStatusResponse:
        """Raises: Unavailable: no answer."""
        try:
            async with self._stub() as stub:
                return await stub.GetStatus(controller_pb2.GetStatusRequest(), timeout=_SHORT_RPC_S)
        except grpc.aio.AioRpcError as error:
            self._address = ""
            raise Unavailable(f"the controller does not answer: {error.details()}") from None

    @contextlib.asynccontextmanager
    async def _stub(self) -> AsyncIterator["ControllerServiceAsyncStub"]:
        if not self._address:
            self._address = await self._resolve_address()
        async with self._channels.use(self._address) as channel:
            yield ControllerServiceStub(channel)


def queue_deadline(live: LiveReq) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"request '{live.req.req_id}' waited its whole {live.req.time_limit_s:g} s in the queue; "
        "set a later deadline or retry when the load is lower",
        "queue",
    )
