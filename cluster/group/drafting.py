"""DrafterSlot: the drafter of a step loop, which may change or fail at any time."""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.cluster.group.step_rows import StepRow
from paceline.worker.spec.drafter import DraftContext, Drafter, DraftHealth
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import ReqId

log = logging.getLogger(__name__)


class DrafterSlot:
    """Owns at most one drafter: whatever it replaces, it shuts down.

    `replace` is for any thread, all else for the step thread. Nothing here raises because a
    drafter is slow, dead or wrong.

    Args:
        vocab_size: trees with other ids are dropped; 0 leaves them unchecked.
    """

    def __init__(self, drafter: Drafter | None, *, vocab_size: int) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._change: _Change | None = None
        self._epoch = 0
        self._past: DraftHealth | None = None  # of the drafters that were replaced

    @property
    def epoch(self) -> int:
        """Of the latest `replace`; 0 before."""
        return self._epoch

    @property
    def is_attached(self) -> bool:
        """Whether the next step will have a drafter."""
        with self._lock:
            drafter = self._drafter if self._change is None else self._change.drafter
        return drafter is not None

    def health(self) -> DraftHealth | None:
        """Any thread: the drafter's, with the totals of those before it; None if none had a draft.

        Totals never shrink, so that they can be scraped as counters.
        """
        with self._lock:
            return self._health()

    def _health(self) -> DraftHealth | None:
        now = self._drafter.health() if self._drafter is not None else None
        if self._past is None:
            return now
        return (now or DraftHealth()).after(self._past)

    def replace(self, drafter: Drafter | None, epoch: int) -> None:
        with self._lock:
            skipped, self._change = self._change, _Change(drafter)
            self._epoch = epoch
            if skipped is not None and skipped.drafter in (drafter, self._drafter):
                skipped = None
        if skipped is not None:
            _shut_down_aside(skipped.drafter)

    def swap(self) -> None:
        """Takes the replacement, if there is one; the old drafter has no step any more."""
        with self._lock:
            change, self._change = self._change, None
            if change is None or change.drafter is self._drafter:
                return
            self._past = self._health()
            old, self._drafter = self._drafter, change.drafter
        _shut_down_aside(old)

    def close(self) -> None:
        """Shuts all down; the slot is empty then."""
        self.replace(None, self._epoch)
        self.swap()

    def propose(self, rows: Iterable[StepRow]) -> dict[ReqId, DraftTree]:
        """A usable tree for each decoding row that the drafter has one for."""
        if self._drafter is None:
            return {}
        contexts = [
            DraftContext(
                req_id=row.req.req_id,
                prompt_ids=row.req.prompt_ids,
                output_ids=row.req.output_ids,
                params=row.req.params,
                max_draft_tokens=row.num_tokens,
                accept_length=row.req.accept_length,
            )
            for row in rows
            if row.is_decoding
        ]
        if not contexts:
            return {}
        try:
            trees = self._drafter.propose(contexts)
        except Exception:  # a drafter costs speed, never a req
            log.warning("drafter failed num_rows=%d", len(contexts), exc_info=True)
            return {}
        return {
            context.req_id: tree
            for context, tree in zip(contexts, trees, strict=False)
            if tree is not None and self._is_in_vocab(tree.token_ids)
        }

    def forget(self, req_ids: Sequence[ReqId]) -> None:
        """Tells the drafter of reqs that ended or were preempted."""
        if self._drafter is None or not req_ids:
            return
        try:
            self._drafter.close_reqs(req_ids)
        except Exception:  # as above
            log.warning("drafter failed num_closed=%d", len(req_ids), exc_info=True)

    def _is_in_vocab(self, ids: Sequence[int]) -> bool:
        if self._vocab_size == 0 or not ids:
            return True
        return min(ids) >= 0 and max(ids) < self._vocab_size


@dataclass(frozen=True, slots=True)
class _Change:
    drafter: Drafter | None


def _shut_down_aside(drafter: Drafter | None) -> None:
    """On a thread of its own: it may take seconds."""
    if drafter is not None:
        threading.Thread(target=drafter.shutdown, name="drafter-shutdown", daemon=True).start()
