"""GroupLeader: rank 0 of a target group: step loop, device thread, gRPC face, load reports.

A plain class; cluster/group/spawn.py wraps it for Ray. The controller calls `reserve`, `build`
and then `run`, which lasts as long as the group serves.
"""

import asyncio
import logging
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.cluster.group.rank_start import RankStart
from paceline.cluster.group.reporter import Reporter
from paceline.cluster.group.server import GroupServer
from paceline.cluster.group.settings import RankSettings
from paceline.cluster.naming import controller_resolver
from paceline.cluster.scheduling.dispatch import GroupLoad
from paceline.worker.errors import Unavailable
from paceline.worker.step import Epoch

if TYPE_CHECKING:
    from paceline.cluster.group.step_loop import StepLoop
    from paceline.worker.config import ModelConfig, WorkerConfig
    from paceline.worker.spec.drafter import Drafter
    from paceline.worker.spec.ngram_corpus import Corpus
    from paceline.worker.target.executor import Executor

log = logging.getLogger(__name__)

_STOP_S = 10.0  # for the step in progress when the loop is told to stop
_ORDERED_DRAIN_S = 86_400.0  # the controller that ordered it decides when to give up


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """What the controller learns from a leader that is ready."""

    address: str  # host:port of its gRPC listener
    num_pages: int
    model: "ModelConfig"  # as this node's checkpoint says, so that fronts need not read it


class GroupLeader:
    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._start = RankStart(settings)
        self._address = ""
        self._config: WorkerConfig | None = None
        self._executor: Executor | None = None
        self._loop: StepLoop | None = None
        self._corpus: Corpus | None = None
        self._stepping: Future[None] | None = None
        self._vocab_hash = b""
        self._epoch = 0
        self._attach_lock = asyncio.Lock()
        self._has_ended = asyncio.Event()
        self._drain_task: asyncio.Task[int] | None = None

    async def pid(self) -> int:
        return self._start.pid

    async def progress(self) -> tuple[str, float]:
        return self._start.progress

    async def reserve(self) -> str:
        return self._start.reserve()

    async def build(self, rendezvous: str) -> LeaderInfo:
        """Loads the model, opens the listener and starts stepping.

        Raises: ConfigError, NotFound, Unavailable: as `build_executor`.
        """
        drafter = await asyncio.get_running_loop().run_in_executor(
            self._start.device_thread, self._build, rendezvous
        )
        assert self._config is not None
        assert self._executor is not None
        self._loop = self._make_loop(self._config, self._executor, drafter)
        self._reporter = Reporter(
            self._report, controller_resolver(self._settings.namespace), self._begin_drain
        )
        self._server = GroupServer(
            self._loop,
            group_id=self._settings.group_id,
            attach_draft=self.attach_draft,
            on_change=self._reporter.note_change,
        )
        port = await self._server.start(self._start.host)
        self._address = f"{self._start.host}:{port}"
        self._start.tell("ready", 1.0)
        log.info("group serving group=%s address=%s", self._settings.group_id, self._address)
        return LeaderInfo(self._address, self._executor.num_pages, self._config.model)

    async def run(self) -> None:
        """Steps until `stop`. Raises: Unavailable: the loop failed, and with it the group."""
        assert self._loop is not None, "run before build"
        aio_loop = asyncio.get_running_loop()
        self._stepping = self._start.device_thread.submit(self._run_loop, self._loop, aio_loop)
        reports = asyncio.create_task(self._reporter.run())
        ended = asyncio.create_task(self._has_ended.wait())
        try:
            # Reports never end by themselves; a group that cannot report is of no use.
            await asyncio.wait((ended, reports), return_when=asyncio.FIRST_COMPLETED)
            if reports.done():
                reports.result()
        finally:
            reports.cancel()
            ended.cancel()
            await self._server.set_not_serving()
        if not self._loop.healthy:
            await self._server.stop(1.0)  # the errors of the running streams still go out
            raise Unavailable(
                f"the step loop of group {self._settings.group_id} failed; see its log"
            )

    async def drain(self, timeout_s: float) -> int:
        """Refuses new reqs and waits for the running; how many were aborted at the limit."""
        return await self._server.drain(timeout_s) if self._loop is not None else 0

    async def stop(self) -> None:
        """Ends the group: the loop, the listener, then the other ranks."""
        if self._loop is not None:
            await asyncio.to_thread(self._loop.stop)
            await self._server.stop(1.0)
        if self._stepping is not None:
            await asyncio.to_thread(wait, (self._stepping,), _STOP_S)
        if self._executor is not None:
            await asyncio.to_thread(self._executor.shutdown)

    async def attach_draft(self, address: str, draft_group_id: str, epoch: int) -> None:
        """Takes a draft group as this group's own, or none when `address` is empty.

        A call older than one already done changes nothing.
        """
        assert self._loop is not None, "attach before build"
        async with self._attach_lock:
            if epoch <= self._epoch:
                return
            self._epoch = epoch
            drafter = self._link_drafter(address, epoch) if address else self._fallback()
            self._loop.set_drafter(drafter, epoch=epoch)
        self._reporter.note_change()
        log.info("pairing changed draft=%s address=%s epoch=%d", draft_group_id, address, epoch)

    # ---- building, on the device thread

    def _build(self, rendezvous: str) -> "Drafter | None":
        from paceline.cluster.group.corpus import load_corpus
        from paceline.worker.spec.vocab import vocab_hash
        from paceline.worker.target.build import build_executor

        start = self._start
        config = start.config(rendezvous)
        executor = build_executor(config, start.tell, listener=start.take_listener())
        self._config, self._executor = config, executor
        if config.spec.method == "standalone":
            self._vocab_hash = vocab_hash(config.model.path)
        # Last: ranks that are built wait without a limit, unlike those that meet.
        self._corpus = load_corpus(config.spec, config.model, start.tell)
        return self._first_drafter()

    def _first_drafter(self) -> "Drafter | None":
        """The drafter on the host until the controller attaches one; none where ranks draft."""
        spec = self._settings.spec
        if spec.method == "ngram":
            from paceline.worker.spec.ngram import NgramDrafter

            return NgramDrafter(spec, corpus=self._corpus)
        return self._fallback()

    def _link_drafter(self, address: str, epoch: int) -> "Drafter":
        from paceline.worker.link.grpc_link import GrpcLink
        from paceline.worker.spec.link_drafter import LinkDrafter

        assert self._config is not None
        model, spec = self._config.model, self._settings.spec
        link = GrpcLink(
            address,
            target_group_id=self._settings.group_id,
            vocab_hash=self._vocab_hash,
            vocab_size=model.vocab_size,
            spec=spec,
            max_num_reqs=self._settings.scheduler.max_num_seqs,
            max_model_len=model.max_model_len,
            epoch=Epoch(epoch),
        )
        return LinkDrafter(link, spec, self._fallback(), vocab_size=model.vocab_size)

    def _fallback(self) -> "Drafter | None":
        """What guesses while no draft answers."""
        if self._settings.fallback != "ngram":
            return None
        from paceline.worker.spec.ngram import NgramDrafter

        return NgramDrafter(self._settings.spec, corpus=self._corpus)

    def _make_loop(
        self, config: "WorkerConfig", executor: "Executor", drafter: "Drafter | None"
    ) -> "StepLoop":
        from paceline.cluster.group.step_loop import StepLoop

        return StepLoop(
            executor,
            drafter,
            cache=config.cache,
            scheduler=config.scheduler,
            spec=config.spec,
            max_model_len=config.model.max_model_len,
            eos_token_ids=config.model.eos_token_ids,
            vocab_size=config.model.vocab_size,
            group_id=self._settings.group_id,
        )

    # ---- while it runs

    def _run_loop(self, loop: "StepLoop", aio_loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run()
        finally:
            aio_loop.call_soon_threadsafe(self._has_ended.set)

    def _report(self) -> GroupLoad:
        assert self._loop is not None
        return replace(self._loop.load(), address=self._address)

    def _begin_drain(self) -> None:
        if self._drain_task is None:
            self._drain_task = asyncio.create_task(self._server.drain(_ORDERED_DRAIN_S))
