"""Executor: one rank's part in every step of its group.

The leader (tp_rank 0) sends each message to the other ranks and applies it itself; `follow` is
the other ranks' loop. Called by one thread, the one that owns the device.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.config import WorkerConfig
from paceline.worker.errors import Unavailable
from paceline.worker.graphs import CudaGraphs, Graphs
from paceline.worker.parallel.collective import Collective
from paceline.worker.runner import Runner
from paceline.worker.sampler import Sampler
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.eagle_sync import SyncPath
from paceline.worker.spec.limits import is_overlapped
from paceline.worker.spec.speculation_path import FinishedStep, SpeculationPath
from paceline.worker.step import (
    Heartbeat,
    KvMoves,
    LeaderMessage,
    PendingStep,
    SamplingRow,
    Shutdown,
    StepPlan,
    StepReply,
    decode_message,
    encode_message,
)
from paceline.worker.target.verify import decide

log = logging.getLogger(__name__)

# A follower hears from an idle leader this many times within its timeout.
_BEATS_PER_TIMEOUT = 4


class Executor:
    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        collective: Collective,
        clock: Clock | None = None,
        draft: ColocatedDraft | None = None,
    ) -> None:
        self.config = config
        model = config.model
        self.sampler = Sampler(runner.kernels, model.vocab_size, model.eos_token_ids, config.spec)
        self._runner = runner
        self._collective = collective
        self._clock = clock or SystemClock()
        self._sent_s = self._clock.monotonic()
        self._failure = ""
        self._path: SpeculationPath | None = None
        if draft is not None:
            self._path = _make_path(config, runner, draft, collective, self.sampler)

    @property
    def is_overlapped(self) -> bool:
        """Whether a step may be launched before the one before it was collected."""
        return self._path is not None and self._path.is_overlapped

    @property
    def num_pages(self) -> int:
        """Pages that reqs may own, numbered from 1."""
        return self._runner.kv.num_pages

    @property
    def page_size(self) -> int:
        return self._runner.kv.page_size

    @property
    def kernels(self) -> KernelSet:
        return self._runner.kernels

    @property
    def tp_rank(self) -> int:
        return self._collective.tp_rank

    @property
    def tp_size(self) -> int:
        return self._collective.tp_size

    def forward(self, plan: StepPlan) -> Tensor | None:
        """Computes the plan on every rank; the wanted logits, [n, vocab_size] fp32.

        With one rank a failure costs this step only: what it wrote lies behind what any req has
        committed. With several it ends the group, since the ranks no longer agree. The logits are
        an inference tensor: write into them under `torch.inference_mode` only.

        Raises: Unavailable: the group has failed, now or before.
        """
        # Built before it is sent, so that a plan that cannot be never reaches the others.
        batch = self._runner.build(plan)
        self._send(plan)
        try:
            return self._runner.forward(batch).logits
        except BaseException as error:
            self._fail(f"step {plan.step_id} failed: {error!r}")
            raise

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        """Begins a step. Without overlap it is done when this returns.

        Raises: Unavailable: the group has failed, now or before.
        """
        if self._path is None:
            return FinishedStep(self._execute_plain(plan, sampling))
        self._send(plan)
        try:
            return self._path.launch(plan, sampling)
        except BaseException as error:
            self._fail(f"step {plan.step_id} failed: {error!r}")
            raise

    def execute(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> StepReply:
        """One step, and what came of it."""
        return self.launch(plan, sampling).collect()

    @torch.inference_mode()
    def _execute_plain(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> StepReply:
        """Forward, verify or sample, and the KV of accepted branches moved in line."""
        logits = self.forward(plan)
        assert logits is not None, "only the leader executes"
        decision = decide(plan, logits, sampling, self.sampler, self.kernels)
        moves = self._runner.req_to_token.line_up(plan.rows, decision.paths)
        if moves.src:
            self.move_kv(moves)
        return StepReply(plan.step_id, decision.rows)

    def move_kv(self, moves: KvMoves) -> None:
        """slot tgt[i] = slot src[i] in every layer of every rank."""
        self._send(moves)
        self._runner.move_kv(moves)

    def heartbeat(self) -> None:
        """Tells idle followers that the leader lives; cheap, and silent when it spoke lately."""
        if self.tp_size == 1:
            return
        interval_s = self.config.parallel.timeout_s / _BEATS_PER_TIMEOUT
        if self._clock.monotonic() - self._sent_s >= interval_s:
            self._send(Heartbeat())

    def follow(self) -> None:
        """Applies the leader's messages until it shuts the group down.

        Raises: Unavailable: the leader was silent for the group's timeout, or is gone.
        """
        assert self.tp_rank > 0, "the leader does not follow"
        while True:
            message = decode_message(self._collective.broadcast_bytes(None))
            match message:
                case StepPlan():
                    try:
                        if self._path is None:
                            self._runner.forward(self._runner.build(message))
                        else:
                            self._path.follow(message)
                    except BaseException as error:
                        self._fail(f"step {message.step_id} failed: {error!r}")
                        raise
                case KvMoves():
                    self._runner.move_kv(message)
                case Heartbeat():
                    pass
                case Shutdown():
                    log.info("left group tp_rank=%d", self.tp_rank)
                    self._collective.shutdown()
                    return

    def shutdown(self) -> None:
        """Ends the followers (called by the leader) and closes the group. Safe to repeat."""
        if self._failure:
            return
        try:
            if self.tp_rank == 0:
                self._send(Shutdown())
        except Unavailable as error:
            log.warning("followers were gone at shutdown error=%s", error)
        finally:
            self._failure = "the executor is shut down"
            self._collective.shutdown()

    def _send(self, message: LeaderMessage) -> None:
        if self._failure:
            raise Unavailable(f"the group cannot go on: {self._failure}")
        if self.tp_size == 1:
            return
        try:
            self._collective.broadcast_bytes(encode_message(message))
        except Unavailable as error:
            self._fail(str(error))
            raise
        self._sent_s = self._clock.monotonic()

    def _fail(self, reason: str) -> None:
        """Ends a group of several ranks, which wakes those that wait for this one."""
        if self.tp_size == 1:
            return
        log.error("group failed tp_rank=%d reason=%s", self.tp_rank, reason)
        self._failure = self._failure or reason
        self._collective.shutdown()


def _make_path(
    config: WorkerConfig,
    runner: Runner,
    draft: ColocatedDraft,
    collective: Collective,
    sampler: Sampler,
) -> SpeculationPath:
    if is_overlapped(config.spec, config.device):
        from paceline.worker.spec.eagle_overlap import OverlapPath

        graphs: Graphs | None = None
        if config.cuda_graphs and config.device.startswith("cuda") and collective.tp_size == 1:
            graphs = CudaGraphs(runner.req_to_token.table.device)
        return OverlapPath(config, runner, draft, collective, graphs)
    return SyncPath(config, runner, draft, collective, sampler)
