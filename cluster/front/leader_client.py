"""A front's side of GroupService: runs on groups' leaders, and how one may fail."""

import asyncio
import logging

import grpc

from paceline.cluster.front.channels import ChannelCache
from paceline.cluster.front.leader_stream import LeaderRun, LeaderStream
from paceline.cluster.front.live import LiveReq
from paceline.cluster.wire import sampling_params_to_pb
from paceline.protos.v1 import common_pb2, group_pb2
from paceline.protos.v1.group_pb2_grpc import GroupServiceStub
from paceline.worker.clock import Clock
from paceline.worker.errors import (
    DeadlineExceeded,
    PacelineError,
)

log = logging.getLogger(__name__)

# How long a leader may take to end a request and hand over its receipt.
SETTLE_S = 1.0


class LeaderClient:
    """One stream per leader, opened with its first run and kept until it breaks."""

    def __init__(self, channels: ChannelCache, clock: Clock) -> None:
        self._channels = channels
        self._clock = clock
        self._streams: dict[str, LeaderStream] = {}

    def start(self, live: LiveReq) -> LeaderRun:
        """Has the request run by the leader it was given; who starts it closes it."""
        req = live.req
        request = group_pb2.StartReq(
            req_id=req.req_id,
            prompt_ids=req.prompt_ids,
            output_ids=live.answer.output_ids,
            sampling_params=sampling_params_to_pb(req.params),
            priority=req.priority,
            deadline_unix_s=req.deadline_unix_s,
        )
        stream = self._streams.get(live.address)
        if stream is None:
            stream = LeaderStream(live.address, self._channels, self._forget)
            self._streams[live.address] = stream
        time_left_s = max(0.0, req.deadline_unix_s - self._clock.unix_s())
        return stream.start(request, time_left_s=time_left_s)

    async def settle(self, run: LeaderRun) -> common_pb2.Receipt:
        """Ends a run that the front has had enough of; the group's share of the receipt.

        To close it would end it too, but the receipt would be lost.
        """
        run.abort()
        try:
            async with asyncio.timeout(SETTLE_S):
                while (news := await run.read()) is not None:
                    _, end = news
                    if end is not None:
                        return end.receipt
        except (PacelineError, TimeoutError):
            pass  # the answer is complete without it
        return common_pb2.Receipt()

    async def abort(self, address: str, req_id: str) -> bool:
        """Whether the leader at `address` ended a request of this id, of any front."""
        try:
            async with self._channels.use(address) as channel:
                reply = await GroupServiceStub(channel).AbortReq(
                    group_pb2.AbortReqRequest(req_id=req_id), timeout=SETTLE_S
                )
        except grpc.aio.AioRpcError as error:
            log.debug("abort not delivered address=%s req_id=%s: %s", address, req_id, error)
            return False
        return reply.found

    async def close(self) -> None:
        """Ends what runs still."""
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))

    def _forget(self, stream: LeaderStream) -> None:
        if self._streams.get(stream.address) is stream:
            del self._streams[stream.address]


def explain(live: LiveReq, error: PacelineError) -> PacelineError:
    """What ended a run, in the words of who asked for it."""
    if isinstance(error, DeadlineExceeded):
        num_tokens = len(live.answer.output_ids)
        return DeadlineExceeded(
            f"the {live.req.time_limit_s:g} s of request '{live.req.req_id}' passed after "
            f"{num_tokens} tokens; set a later deadline or lower max_tokens",
            "decode" if num_tokens else error.phase or "prefill",
        )
    return error
