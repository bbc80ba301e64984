"""LinkDrafter: a drafter that asks a draft behind a link, once per step and never for long."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.worker.clock import Clock, SystemClock
from paceline.worker.config import SpecConfig
from paceline.worker.link.base import Commit, DraftLink, Proposals
from paceline.worker.spec.breaker import CircuitBreaker
from paceline.worker.spec.drafter import DraftContext, Drafter, DraftHealth
from paceline.worker.spec.session import DraftSession
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import ReqId

log = logging.getLogger(__name__)

_RTT_WEIGHT = 0.1


@dataclass(slots=True)
class LinkCounters:
    """Totals since the drafter was made; `last_*` are of the last answered round."""

    num_rounds: int = 0  # questions sent
    num_late: int = 0  # of these, unanswered in time
    num_skipped: int = 0  # steps that did not ask: link down, or given up for a while
    num_draft_rows: int = 0  # rows that got a tree of the draft
    num_fallback_rows: int = 0  # rows that wanted one and did not
    num_stale_rows: int = 0
    num_malformed_rows: int = 0
    num_needs_sync_rows: int = 0
    num_sync_rows: int = 0
    total_rtt_s: float = 0.0  # of answered rounds, the draft's own work included
    last_rtt_s: float = 0.0
    mean_rtt_s: float = 0.0  # of the latest, each weighing a tenth
    total_draft_us: int = 0
    last_draft_us: int = 0


class LinkDrafter(Drafter):
    """Exchanges one round per `propose`, which lasts `spec.draft_timeout_s` at most.

    A row without a fresh tree is `fallback`'s, or None. A link that is down, or that let several
    rounds in a row pass unanswered, is not asked and costs nothing.
    """

    def __init__(
        self,
        link: DraftLink,
        spec: SpecConfig,
        fallback: Drafter | None = None,
        *,
        vocab_size: int = 0,
        clock: Clock | None = None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self._link = link
        self._timeout_s = spec.draft_timeout_s
        self._fallback = fallback
        self._session = DraftSession(spec, vocab_size=vocab_size)
        self._clock = clock or SystemClock()
        self._breaker = breaker or CircuitBreaker()
        self._counters = LinkCounters()

    @property
    def link(self) -> DraftLink:
        return self._link

    def counters(self) -> LinkCounters:
        """A copy; any thread."""
        return replace(self._counters)

    def health(self) -> DraftHealth:
        counters = self._counters
        return DraftHealth(
            is_up=self._link.is_up and not self._breaker.is_open,
            refusal=self._link.refusal,
            num_rounds=counters.num_rounds,
            num_late_rounds=counters.num_late,
            num_stale_rows=counters.num_stale_rows,
            num_fallback_rows=counters.num_fallback_rows,
            rtt_s=counters.mean_rtt_s,
        )

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        trees = self._ask(contexts)
        missing = [
            i for i, tree in enumerate(trees) if tree is None and contexts[i].max_draft_tokens > 1
        ]
        self._counters.num_draft_rows += sum(tree is not None for tree in trees)
        self._counters.num_fallback_rows += len(missing)
        if missing and self._fallback is not None:
            guesses = self._fallback.propose([contexts[i] for i in missing])
            for i, guess in zip(missing, guesses, strict=True):
                trees[i] = guess
        return trees

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        closed = list(req_ids)
        self._session.close_reqs(closed)
        self._link.close_reqs(closed)
        if self._fallback is not None:
            self._fallback.close_reqs(closed)

    def shutdown(self) -> None:
        self._link.shutdown()
        if self._fallback is not None:
            self._fallback.shutdown()

    def _ask(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        nothing: list[DraftTree | None] = [None] * len(contexts)
        if not self._link.is_up or not self._breaker.allows(self._clock.monotonic()):
            self._counters.num_skipped += 1
            return nothing
        commit = self._session.begin_round(self._link.epoch, contexts)
        if not commit.rows:
            return nothing
        outcome = self._session.finish_round(contexts, commit, self._exchange(commit))
        self._counters.num_stale_rows += outcome.num_stale
        self._counters.num_malformed_rows += outcome.num_malformed
        self._counters.num_needs_sync_rows += outcome.num_needs_sync
        return list(outcome.trees)

    def _exchange(self, commit: Commit) -> Proposals | None:
        counters, start_s = self._counters, self._clock.monotonic()
        was_open = self._breaker.is_open
        counters.num_rounds += 1
        counters.num_sync_rows += len(commit.syncs)
        proposals = self._link.exchange(commit, self._timeout_s)
        now_s = self._clock.monotonic()
        if proposals is None:
            counters.num_late += 1
            if self._link.is_up:  # a link that broke reports itself; it was not slow
                self._breaker.record_failure(now_s)
            if self._breaker.is_open and not was_open:
                log.warning("draft given up for now timeout_s=%g", self._timeout_s)
            return None
        self._breaker.record_success()
        if was_open:
            log.info("draft answers again")
        counters.last_rtt_s = now_s - start_s
        counters.total_rtt_s += counters.last_rtt_s
        if counters.mean_rtt_s == 0.0:
            counters.mean_rtt_s = counters.last_rtt_s
        counters.mean_rtt_s += _RTT_WEIGHT * (counters.last_rtt_s - counters.mean_rtt_s)
        counters.last_draft_us = proposals.draft_us
        counters.total_draft_us += proposals.draft_us
        return proposals
