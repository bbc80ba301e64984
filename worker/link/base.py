"""DraftLink: the target's end of the exchange with a draft, in lockstep.

A round is one question for the whole batch and one answer. The link knows rows and lengths, not
models: `worker/spec/session.py` decides what a row must carry.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId


@dataclass(frozen=True, slots=True)
class SyncRow:
    """All that a draft needs to begin, or begin again, with a req."""

    req_id: ReqId
    token_ids: tuple[int, ...]  # prompt and committed output
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class CommitRow:
    """Tokens made final since `base_len`, and the size of the tree wanted behind them."""

    req_id: ReqId
    base_len: int
    token_ids: tuple[int, ...]
    accept_length: int
    num_draft_tokens: int  # nodes with the root; 0 means commit only

    @property
    def commit_len(self) -> int:
        return self.base_len + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Commit:
    epoch: Epoch
    round: int
    syncs: tuple[SyncRow, ...]
    rows: tuple[CommitRow, ...]


@dataclass(frozen=True, slots=True)
class ProposalRow:
    req_id: ReqId
    commit_len: int  # committed tokens the tree was made for
    tree: DraftTree


@dataclass(frozen=True, slots=True)
class Proposals:
    epoch: Epoch
    round: int
    rows: tuple[ProposalRow, ...]
    needs_sync: tuple[ReqId, ...] = ()
    draft_us: int = 0


class DraftLink(ABC):
    """Carries rounds to one draft.

    `epoch` rises whenever what the draft knows of our reqs is lost (attach, stream break), so
    that the session syncs again. Nothing here raises because a draft is slow, dead or wrong.
    """

    @property
    @abstractmethod
    def epoch(self) -> Epoch: ...

    @property
    @abstractmethod
    def is_up(self) -> bool: ...

    @property
    def refusal(self) -> str:
        """Why the draft refused the last attach; empty when it did not."""
        return ""

    @abstractmethod
    def exchange(self, commit: Commit, timeout_s: float) -> Proposals | None:
        """Sends a round and waits for its answer; None when it did not come in time.

        An answer of an earlier round or another epoch is dropped, never returned.
        """

    @abstractmethod
    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        """Tells the draft to free these reqs; never waits."""

    @abstractmethod
    def shutdown(self) -> None: ...
