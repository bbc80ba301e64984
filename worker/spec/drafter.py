"""Drafter: what a target's step loop asks for guesses. A drafter may fail, never mislead."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import ReqId, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One req that is about to be verified."""

    req_id: ReqId
    # The req's own lists, read only. Together they are the committed tokens, `verified_id` last.
    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    max_draft_tokens: int  # nodes with the root, at least 1; 1 leaves no room for a guess
    accept_length: int = 0  # of the req's last verify

    @property
    def commit_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class DraftHealth:
    """How a link to a draft fares, as the message DraftHealth says it."""

    is_up: bool = False
    refusal: str = ""
    num_rounds: int = 0
    num_late_rounds: int = 0
    num_stale_rows: int = 0
    num_fallback_rows: int = 0
    rtt_s: float = 0.0

    def after(self, earlier: "DraftHealth") -> "DraftHealth":
        """With the totals of a link that has ended."""
        return replace(
            self,
            num_rounds=self.num_rounds + earlier.num_rounds,
            num_late_rounds=self.num_late_rounds + earlier.num_late_rounds,
            num_stale_rows=self.num_stale_rows + earlier.num_stale_rows,
            num_fallback_rows=self.num_fallback_rows + earlier.num_fallback_rows,
        )


class Drafter(ABC):
    """Proposes a tree for each req, or none.

    Called on the step thread only, but for `health`. `propose` returns within its configured limit
    whatever happens to the draft, and raises nothing: a row it has no fresh proposal for is None.
    """

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """A tree of at most `max_draft_tokens` nodes behind each context, in the same order."""

    @abstractmethod
    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        """Forgets reqs that ended, were aborted or preempted. Unknown ids are ignored."""

    @abstractmethod
    def shutdown(self) -> None:
        """Frees what the drafter holds, within a few seconds."""

    def health(self) -> DraftHealth | None:
        """Any thread; None for a drafter that asks no draft."""
        return None
