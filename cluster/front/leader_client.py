"""A front's side of GroupService: one run on a group's leader, and how it may fail."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import grpc

from paceline.cluster.front.channels import ChannelCache
from paceline.cluster.front.errors import from_rpc_error, is_ours
from paceline.cluster.front.live import LiveReq
from paceline.cluster.wire import sampling_params_to_pb
from paceline.protos.v1 import common_pb2, group_pb2
from paceline.protos.v1.group_pb2_grpc import GroupServiceStub
from paceline.worker.clock import Clock
from paceline.worker.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    PacelineError,
    Unavailable,
)

log = logging.getLogger(__name__)

# How long a leader may take to end a request and hand over its receipt.
SETTLE_S = 1.0
# What gRPC itself answers when the process behind a connection dies.
_LOST_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class TryAgain(Exception):
    """A leader was lost, or has not yet forgotten an earlier request of this id."""

    def __init__(self, error: PacelineError) -> None:
        super().__init__(error)
        self.error = error


class LeaderClient:
    def __init__(self, channels: ChannelCache, clock: Clock) -> None:
        self._channels = channels
        self._clock = clock

    async def run(self, live: LiveReq) -> AsyncGenerator[group_pb2.RunResponse, None]:
        """The leader's messages; ends early only when the request was woken up to end.

        Raises: TryAgain; DeadlineExceeded; or what the leader says.
        """
        request = group_pb2.RunRequest(
            req_id=live.req.req_id,
            prompt_ids=live.req.prompt_ids,
            output_ids=live.answer.output_ids,
            sampling_params=sampling_params_to_pb(live.req.params),
            priority=live.req.priority,
            deadline_unix_s=live.req.deadline_unix_s,
        )
        time_left_s = max(0.0, live.req.deadline_unix_s - self._clock.unix_s())
        async with self._channels.use(live.address) as channel:
            if live.is_ending:  # since the queue answered, when there was no call to cancel
                return
            live.call = call = GroupServiceStub(channel).Run(request, timeout=time_left_s)
            try:
                while (message := await self._read(live)) is not None:
                    yield message
            finally:
                live.call = None
                call.cancel()

    async def settle(self, live: LiveReq) -> common_pb2.Receipt:
        """Ends a run that the front has had enough of; the group's share of the receipt.

        A bare cancel would end it too, but the receipt would be lost.
        """
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.abort(live.address, live.req.req_id)
                while isinstance(message := await live.call.read(), group_pb2.RunResponse):
                    if message.finish_reason:
                        return message.receipt
        except (grpc.aio.AioRpcError, TimeoutError):
            pass
        except asyncio.CancelledError:
            if not live.was_woken():  # else it is to end, and its answer is complete
                raise
        return common_pb2.Receipt()

    async def abort(self, address: str, req_id: str) -> bool:
        """Whether the leader at `address` ended a request of this id."""
        try:
            async with self._channels.use(address) as channel:
                reply = await GroupServiceStub(channel).AbortReq(
                    group_pb2.AbortReqRequest(req_id=req_id), timeout=SETTLE_S
                )
        except grpc.aio.AioRpcError as error:
            log.debug("abort not delivered address=%s req_id=%s: %s", address, req_id, error)
            return False
        return reply.found

    async def _read(self, live: LiveReq) -> group_pb2.RunResponse | None:
        try:
            message = await live.call.read()
        except asyncio.CancelledError:
            if live.was_woken():
                return None
            raise
        except grpc.aio.AioRpcError as rpc_error:
            if live.is_ending:
                return None
            raise self._translate(live, rpc_error) from None
        if isinstance(message, group_pb2.RunResponse):
            return message
        raise InternalError(
            f"group '{live.group_id}' ended request '{live.req.req_id}' without a finish reason"
        )

    def _translate(self, live: LiveReq, rpc_error: grpc.aio.AioRpcError) -> Exception:
        error = from_rpc_error(rpc_error)
        if isinstance(error, DeadlineExceeded):
            num_tokens = len(live.answer.output_ids)
            return DeadlineExceeded(
                f"the {live.req.time_limit_s:g} s of request '{live.req.req_id}' passed after "
                f"{num_tokens} tokens; set a later deadline or lower max_tokens",
                "decode" if num_tokens else error.phase or "prefill",
            )
        if isinstance(error, Unavailable) or (
            not is_ours(rpc_error) and rpc_error.code() in _LOST_CODES
        ):
            return TryAgain(Unavailable(error.message))
        if isinstance(error, AlreadyExists):
            # Not in this front, or it had been refused: the leader is about to end an earlier one.
            return TryAgain(error)
        return error
