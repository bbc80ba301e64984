"""StepPipeline: the steps a loop has launched and not yet collected, and how long they took."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.group.step_rows import BuiltStep
from paceline.worker.clock import Clock
from paceline.worker.spec.adapt import DepthController
from paceline.worker.step import PendingStep, SamplingRow, StepPlan, StepReply


class StepExecutor(Protocol):
    """The part of an executor that the loop uses."""

    @property
    def num_pages(self) -> int: ...

    @property
    def is_overlapped(self) -> bool:
        """Whether a step may be launched before the one before is collected."""
        ...

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep: ...

    def heartbeat(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CollectedStep:
    step: BuiltStep
    reply: StepReply
    step_s: float  # since its launch, or since the step before it was done

    def teach(self, depth: DepthController) -> None:
        """Lets the depth of drafts follow what the step brought and cost. Once it is applied."""
        shape = self.step.plan.shape
        if shape is None:
            return
        rows = list(zip(self.step.rows, self.reply.rows, strict=True))
        drafted = [(row.req, result) for row, result in rows if row.is_speculating]
        depth.observe(
            len(drafted),
            shape,
            [r.accept_length for req, r in drafted if not req.has_ended and not r.error],
            self.step_s if len(drafted) == len(rows) else None,
        )


class StepPipeline:
    """Launches and collects in the same order; whoever drives it bounds how many are in flight."""

    def __init__(self, executor: StepExecutor, clock: Clock) -> None:
        self._executor = executor
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._collected_s = float("-inf")

    def __len__(self) -> int:
        return len(self._launched)

    def launch(self, step: BuiltStep) -> None:
        """Raises whatever a device or a peer rank raises; so does `collect`."""
        launched_s = self._clock.monotonic()
        pending = self._executor.launch(step.plan, step.sampling)
        self._launched.append(_Launched(step, pending, launched_s))

    def collect(self) -> CollectedStep:
        """Waits for what came of the oldest step."""
        launched = self._launched.popleft()
        reply = launched.pending.collect()
        started_s = max(launched.launched_s, self._collected_s)
        self._collected_s = self._clock.monotonic()
        return CollectedStep(launched.step, reply, self._collected_s - started_s)

    def clear(self) -> None:
        """Gives up on what is in flight."""
        self._launched.clear()


@dataclass(frozen=True, slots=True)
class _Launched:
    step: BuiltStep
    pending: PendingStep
    launched_s: float
