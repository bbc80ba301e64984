"""SpeculationPath: how the steps of a group with a colocated draft are executed; the contract."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.worker.step import PendingStep, SamplingRow, StepPlan, StepReply


class SpeculationPath(ABC):
    """One rank's part in steps whose SPECULATE rows grow trees and verify them at once.

    A plan holds DECODE, SPECULATE and PREFILL rows. Every rank gets each plan, in the same order.
    """

    # Whether the leader may launch a step before it has collected the one before.
    is_overlapped: bool

    @abstractmethod
    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        """Begins a step, on the leader. sampling: one per row of the plan, as `decide` takes it."""

    @abstractmethod
    def follow(self, plan: StepPlan) -> None:
        """The same step on another rank."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was done by the time it was launched."""

    reply: StepReply

    def collect(self) -> StepReply:
        return self.reply
