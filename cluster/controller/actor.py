"""Controller: the Ray actor that starts a deployment, keeps it running, and ends it.

A plain class, wrapped for Ray by cluster/launch.py. It needs no GPU and loads no torch. It hosts
ControllerService; what it decides is state.py's, how a process lives is supervisors.py's. All that
it creates belongs to it: were it to die, Ray would end its groups and fronts with it.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc
import ray

from paceline.cluster.config import ClusterConfig
from paceline.cluster.controller.core import ControllerCore
from paceline.cluster.controller.deployment import (
    choose_device,
    draft_specs,
    front_specs,
    hosted_front_spec,
    target_specs,
)
from paceline.cluster.controller.events import AttachDraft, DrainBegan
from paceline.cluster.controller.state import ControllerState
from paceline.cluster.controller.supervisors import FrontSupervisor, GroupSupervisor
from paceline.cluster.front.channels import client_options, server_options
from paceline.cluster.placement.groups import view_nodes, wait_for_room
from paceline.cluster.scheduling.admission import AdmissionLimits
from paceline.protos.v1 import admin_pb2, controller_pb2_grpc
from paceline.protos.v1.admin_pb2_grpc import AdminServiceStub
from paceline.worker.errors import Unavailable
from paceline.worker.telemetry import configure_logging

if TYPE_CHECKING:
    from paceline.cluster.front.actor import FrontSpec
    from paceline.protos.v1.admin_pb2_grpc import AdminServiceAsyncStub
    from paceline.worker.config import ModelConfig

log = logging.getLogger(__name__)

_ATTACH_TIMEOUT_S = 5.0
_ATTACH_RETRY_S = 0.5

_MAX_NEWS = 1000  # lines that nobody has fetched

Progress = list[tuple[str, str, float]]  # (process, stage, fraction of the stage)


class Controller:
    def __init__(self, config: ClusterConfig, *, is_local: bool = False) -> None:
        """`is_local`: Ray was started for this deployment, on this machine alone: what our own
        processes say to each other is then not to be reached from outside, and no node will join.
        """
        configure_logging("controller")
        self._config = config
        self._is_local = is_local
        self._host = "127.0.0.1" if is_local else ray.util.get_node_ip_address()
        queue = config.queue
        limits = AdmissionLimits(
            max_waiting_reqs=queue.max_num_reqs, max_waiting_prompt_tokens=queue.max_num_tokens
        )
        self._core = ControllerCore(
            ControllerState(limits), on_attach=self._start_attach, fronts=self._front_addresses
        )
        self._server: grpc.aio.Server | None = None
        self._address = ""
        self._groups: list[GroupSupervisor] = []
        self._fronts: list[FrontSupervisor] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._attaching: dict[str, asyncio.Task[None]] = {}  # by target group
        self._waiting_for = ""
        self._news: deque[str] = deque(maxlen=_MAX_NEWS)
        self._model: ModelConfig | None = None
        self._start_task: asyncio.Task[list[tuple[str, str]]] | None = None

    async def pid(self) -> int:
        return os.getpid()

    async def address(self) -> str:
        """host:port of ControllerService."""
        if not self._address:
            raise Unavailable("the controller is starting")
        return self._address

    async def start(self) -> list[tuple[str, str]]:
        """Brings the whole deployment up; (gRPC, HTTP) addresses of its fronts.

        Raises: PlacementError: no room. ConfigError, NotFound, Unavailable: what failed, where.
            Nothing is left running then.
        """
        self._start_task = asyncio.create_task(self._start())
        try:
            return await self._start_task
        except asyncio.CancelledError:
            raise Unavailable("the start was called off") from None
        except BaseException:
            await self.shutdown(0.0)
            raise

    async def shutdown(self, drain_s: float) -> int:
        """Ends the deployment: fronts first, so that nothing new comes in, each within what is
        left of `drain_s`. Returns how many requests were aborted. Safe to repeat."""
        if self._start_task is not None and not self._start_task.done():
            self._start_task.cancel()
            await asyncio.wait([self._start_task])
        num_aborted: int = 0
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + drain_s
        num_aborted += sum(await _all(front.stop(drain_s) for front in self._fronts))
        self._core.handle(DrainBegan())
        self._core.begin_drain()
        targets = [g for g in self._groups if g.spec.role == "target"]
        left_s = max(0.0, deadline_s - loop.time())
        num_aborted += sum(await _all(target.drain(left_s) for target in targets))
        for attaching in self._attaching.values():
            attaching.cancel()
        # Targets before drafts: a draft that goes first would be missed for a moment.
        await _all(target.stop() for target in targets)
        await _all(group.stop() for group in self._groups if group not in targets)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0.5)
        log.info("deployment ended num_aborted=%d", num_aborted)
        return num_aborted

    async def progress(self) -> Progress:
        """What is being waited for, while the deployment starts."""
        lines: Progress = []
        if self._waiting_for:
            lines.append(("placement", self._waiting_for, 0.0))
        for answers in await _all(group.progress() for group in self._groups):
            lines += answers
        lines += [
            (front.name, "ready" if front.addresses else "start", float(bool(front.addresses)))
            for front in self._fronts
        ]
        return lines

    async def news(self) -> list[str]:
        """What died, did not start again or came back since the last call, a line each."""
        lines = list(self._news)
        self._news.clear()
        return lines

    async def pids(self) -> dict[str, list[int]]:
        """Process ids of this controller, each group and each front, by name."""
        pids = {"controller": [os.getpid()]}
        for group in self._groups:
            pids[group.spec.group_id] = await group.pids()
        for front in self._fronts:
            pids[front.name] = await front.pids()
        return pids

    async def front_spec(self) -> "FrontSpec":
        """What a front must know that somebody else hosts (Ray Serve does).

        Raises: Unavailable: no group has read the model yet.
        """
        if self._model is None:
            raise Unavailable("the deployment is starting")
        return hosted_front_spec(self._config, self._model)

    # ---- start

    async def _start(self) -> list[tuple[str, str]]:
        await self._listen()
        self._spawn(self._core.tick())
        config, nodes = self._config, view_nodes()
        device = choose_device(config, nodes)
        host = self._host if self._is_local else ""
        specs = target_specs(config, device, host) + draft_specs(config, device, host)
        placement = await wait_for_room(
            [spec.request for spec in specs],
            config.ray.placement_timeout_s,
            can_grow=not self._is_local,
            progress=self._say_waiting,
        )
        self._waiting_for = ""
        plans = {plan.group_id: plan for plan in placement.plans}
        self._groups = [
            GroupSupervisor(
                spec,
                plans[spec.group_id],
                emit=self._core.handle,
                say=self._news.append,
                threads_per_rank=config.ray.threads_per_rank,
                placement_timeout_s=config.ray.placement_timeout_s,
                start_timeout_s=config.ray.start_timeout_s,
            )
            for spec in specs
        ]
        for group in self._groups:
            group.start()
        infos = await _all(group.first_start for group in self._groups)
        self._model = infos[0].model
        node_id = ray.get_runtime_context().get_node_id()
        self._fronts = [
            FrontSupervisor(spec, node_id=node_id, say=self._news.append)
            for spec in front_specs(config, self._model)
        ]
        for front in self._fronts:
            front.start()
        return await _all(front.first_start for front in self._fronts)

    async def _listen(self) -> None:
        server = grpc.aio.server(options=server_options())
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self._core, server)
        port = server.add_insecure_port(f"{self._host}:0")
        await server.start()
        self._server, self._address = server, f"{self._host}:{port}"
        log.info("controller serving address=%s", self._address)

    def _say_waiting(self, text: str) -> None:
        self._waiting_for = text

    def _spawn(self, work: Any) -> None:  # Any: a coroutine whose result nobody wants
        self._tasks.append(asyncio.create_task(work))

    def _front_addresses(self) -> list[tuple[str, str]]:
        return [front.addresses for front in self._fronts if front.addresses is not None]

    # ---- pairing

    def _start_attach(self, action: AttachDraft) -> None:
        """The newest pairing of a target takes the place of one that is still being told."""
        if (earlier := self._attaching.get(action.group_id)) is not None:
            earlier.cancel()
        self._attaching[action.group_id] = asyncio.create_task(
            attach(action, self._core.state.is_paired)
        )


async def attach(action: AttachDraft, is_paired: Callable[[AttachDraft], bool]) -> None:
    """Tells a target's leader of its draft, until it answers or the pairing is over."""
    request = admin_pb2.AttachDraftRequest(
        address=action.draft_address,
        draft_group_id=action.draft_group_id,
        epoch=action.epoch,
    )
    async with grpc.aio.insecure_channel(action.address, options=client_options()) as channel:
        stub: AdminServiceAsyncStub = AdminServiceStub(channel)
        while is_paired(action):
            try:
                await stub.AttachDraft(request, timeout=_ATTACH_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "draft not attached yet target=%s draft=%s error=%s",
                    action.group_id, action.draft_group_id, error.details(),
                )  # fmt: skip
                await asyncio.sleep(_ATTACH_RETRY_S)
            else:
                return


async def _all(work: Iterable[Awaitable[Any]]) -> list[Any]:  # Any: each caller knows its own
    return list(await asyncio.gather(*work))
