"""Reporter: a leader's load reports to the controller, for as long as the leader lives.

A report goes out when something changed, every 0.25 s while there is work, and every second while
there is none. A controller that is gone is looked up again by its name; reports are the state it
rebuilds itself from.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import grpc

from paceline.cluster.front.channels import client_options
from paceline.cluster.scheduling.dispatch import GroupLoad
from paceline.cluster.wire import load_to_pb
from paceline.protos.v1 import controller_pb2
from paceline.protos.v1.controller_pb2_grpc import ControllerServiceStub
from paceline.worker.errors import Unavailable

if TYPE_CHECKING:
    from paceline.protos.v1.controller_pb2_grpc import ControllerServiceAsyncStub

log = logging.getLogger(__name__)

_BUSY_S = 0.25
_IDLE_S = 1.0
_MIN_GAP_S = 0.005  # changes that come together are one report
_RETRY_S = 0.2


class Reporter:
    """
    Args:
        load: what to report now; any thread.
        resolve_controller: its host:port, raises Unavailable while there is none.
        on_drain: called when the controller orders this group to drain.
    """

    def __init__(
        self,
        load: Callable[[], GroupLoad],
        resolve_controller: Callable[[], Awaitable[str]],
        on_drain: Callable[[], None],
    ) -> None:
        self._load = load
        self._resolve_controller = resolve_controller
        self._on_drain = on_drain
        self._changed = asyncio.Event()

    def note_change(self) -> None:
        """Reports soon. On the event loop's thread only."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        was_lost = False
        while True:
            try:
                address = await self._resolve_controller()
                async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
                    stub: ControllerServiceAsyncStub = ControllerServiceStub(channel)
                    call = stub.Report(self._reports())
                    async for response in call:
                        was_lost = False
                        if response.drain:
                            self._on_drain()
            except (grpc.aio.AioRpcError, Unavailable) as error:
                if not was_lost:
                    log.warning("controller lost error=%s", _reason(error))
                was_lost = True
            await asyncio.sleep(_RETRY_S)

    async def _reports(self) -> AsyncIterator[controller_pb2.ReportRequest]:
        while True:
            self._changed.clear()
            load = self._load()
            yield load_to_pb(load)
            await asyncio.sleep(_MIN_GAP_S)
            is_busy = bool(load.num_running_reqs or load.num_waiting_reqs)
            try:
                async with asyncio.timeout(_BUSY_S if is_busy else _IDLE_S):
                    await self._changed.wait()
            except TimeoutError:
                continue


def _reason(error: Exception) -> str:
    return (
        (error.details() or error.code().name)
        if isinstance(error, grpc.aio.AioRpcError)
        else str(error)
    )
