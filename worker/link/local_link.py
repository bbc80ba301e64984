"""LocalLink: the exchange with a proposer in the same process, on the caller's own thread."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.worker.link.base import Commit, DraftLink, Proposals
from paceline.worker.step import Epoch, ReqId

if TYPE_CHECKING:
    from paceline.worker.draft.proposer import Proposer

log = logging.getLogger(__name__)

_TARGET = "local"
_EPOCH = Epoch(1)


class LocalLink(DraftLink):
    """Owns its proposer. A round runs to its end whatever `timeout_s` says: there is nothing else
    that could use the time. A draft whose device failed takes the link down for good."""

    def __init__(self, proposer: "Proposer") -> None:
        self._proposer = proposer
        self._is_up = True

    @property
    def epoch(self) -> Epoch:
        return _EPOCH

    @property
    def is_up(self) -> bool:
        return self._is_up

    def exchange(self, commit: Commit, timeout_s: float) -> Proposals | None:
        if not self._is_up or commit.epoch != _EPOCH:
            return None
        try:
            return self._proposer.answer_one(_TARGET, commit)
        except Exception:  # the draft's boundary: whatever it is, the target goes on
            log.exception("draft failed, going on without it")
            self._is_up = False
            return None

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        self._proposer.close_reqs(_TARGET, req_ids)

    def shutdown(self) -> None:
        self._is_up = False
        self._proposer.shutdown()
