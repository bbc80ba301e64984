"""Drafter: what a target's step loop asks for guesses. A drafter may fail, never mislead."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


class Drafter(ABC):
    """Proposes a tree for each req, or none.

    Called on the step thread only. `propose` returns within its configured limit whatever
    happens to the draft, and raises nothing: a row it has no fresh proposal for is None.
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
