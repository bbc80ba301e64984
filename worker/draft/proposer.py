"""Proposer: a draft model that guesses ahead of its targets, one round at a time.

It owns a draft group's executor and what it holds of each req. It knows no transport. A draft
computes a req's committed tokens, root included, without the shift of feature drafts: the logits
of the root are its first guess. What it cannot do (no pages, past its context, a prompt that is
too long for one round) it leaves out: a row then acknowledges its tokens and guesses nothing.
"""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.worker.config import CacheConfig, SpecConfig, WorkerConfig
from paceline.worker.draft.growth import Sprout, Wanted, grow
from paceline.worker.draft.reqs import DraftReq, DraftReqs, ReqKey
from paceline.worker.draft.step_runner import DraftExecutor, StepRunner
from paceline.worker.link.base import Commit, CommitRow, ProposalRow, Proposals
from paceline.worker.sampler import Sampler
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Phase, ReqId, ReqStep

_ROOT_ONLY = DraftTree((), ())


@dataclass(frozen=True, slots=True)
class TreeShape:
    num_steps: int
    topk: int


@dataclass(frozen=True, slots=True)
class Round:
    """One target's question, taken; `needs_sync` are the reqs whose rows did not fit."""

    target: str
    commit: Commit
    needs_sync: tuple[ReqId, ...] = ()
    shape: TreeShape = TreeShape(0, 0)  # of the trees that the target wants


@dataclass(frozen=True, slots=True)
class ProposerSnapshot:
    num_pages: int
    num_free_pages: int
    num_owned_pages: int
    num_cached_pages: int
    num_orphaned_pages: int
    req_ids: tuple[ReqId, ...]
    step_id: int  # forwards done


class Proposer:
    """Answers rounds of any number of targets; one thread at a time.

    Nothing that a target says makes it raise. A `PacelineError` or `RuntimeError` comes from the
    executor and means that the device or a rank of the group is lost.
    """

    def __init__(
        self,
        executor: DraftExecutor,
        spec: SpecConfig,
        cache: CacheConfig,
        max_model_len: int,
        max_num_reqs: int,
        *,
        sampler: Sampler,
        max_catch_up_tokens: int = 512,
    ) -> None:
        """`max_model_len` is the draft's own. A round computes `max_catch_up_tokens` committed
        tokens at most, so that a long prompt does not hold up the other rows."""
        self.executor = executor
        self.max_model_len = max_model_len
        self._shape = TreeShape(spec.num_steps, spec.topk)
        self._max_catch_up_tokens = max_catch_up_tokens
        self._reqs = DraftReqs(
            num_pages=executor.num_pages,
            page_size=cache.page_size,
            max_num_reqs=max_num_reqs,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        self._runner = StepRunner(executor, self._reqs)
        self._sampler = sampler
        self._last_round: dict[str, tuple[int, int]] = {}  # (epoch, round) of each target

    # ---- what targets say

    def take(self, target: str, commit: Commit, shape: TreeShape | None = None) -> Round:
        """Takes the tokens of a round, without computing anything.

        A round older than one already taken changes nothing and has no rows to answer.
        """
        order = (commit.epoch, commit.round)
        if order < self._last_round.get(target, order):
            return Round(target, replace(commit, syncs=(), rows=()))
        self._last_round[target] = order
        for sync in commit.syncs:
            self._reqs.sync(target, sync)
        unfit = [row.req_id for row in commit.rows if not self._reqs.commit(target, row)]
        return Round(target, commit, tuple(unfit), shape or self._shape)

    def answer(self, rounds: Sequence[Round]) -> list[Proposals]:
        """Grows the trees of rounds that were taken, in one batch. Answers are in the same order.

        A req that was closed since has no row in its answer.
        """
        started_s = time.monotonic()
        known = [self._known_rows(round_) for round_ in rounds]
        wanted = [
            want
            for round_, rows in zip(rounds, known, strict=True)
            for row, req in rows
            if (want := self._want(round_, row, req)) is not None
        ]
        trees = grow(self._catch_up(wanted), self._sampler, self._runner)
        draft_us = int((time.monotonic() - started_s) * 1e6)
        return [
            Proposals(
                epoch=round_.commit.epoch,
                round=round_.commit.round,
                rows=tuple(
                    ProposalRow(row.req_id, row.commit_len, trees.get(req.key, _ROOT_ONLY))
                    for row, req in rows
                ),
                needs_sync=round_.needs_sync,
                draft_us=draft_us,
            )
            for round_, rows in zip(rounds, known, strict=True)
        ]

    def answer_one(self, target: str, commit: Commit) -> Proposals:
        return self.answer([self.take(target, commit)])[0]

    def close_reqs(self, target: str, req_ids: Iterable[ReqId]) -> None:
        """Frees what these reqs hold; unknown ones are ignored."""
        for req_id in req_ids:
            self._reqs.forget(ReqKey(target, req_id))

    def close_target(self, target: str) -> None:
        """Frees all that a target's reqs hold."""
        for key in self._reqs.held:
            if key.target == target:
                self._reqs.forget(key)
        self._last_round.pop(target, None)

    # ---- the process around it

    def snapshot(self) -> ProposerSnapshot:
        counts = self._reqs.counts()
        return ProposerSnapshot(
            num_pages=counts.num_pages,
            num_free_pages=counts.num_free,
            num_owned_pages=counts.num_owned,
            num_cached_pages=counts.num_cached,
            num_orphaned_pages=counts.num_orphaned,
            req_ids=tuple(key.req_id for key in self._reqs.held),
            step_id=self._runner.step_id,
        )

    def check(self) -> None:
        """Proves the page invariants; for tests."""
        self._reqs.check()

    def heartbeat(self) -> None:
        self.executor.heartbeat()

    def shutdown(self) -> None:
        self.executor.shutdown()

    # ---- one round

    def _known_rows(self, round_: Round) -> list[tuple[CommitRow, DraftReq]]:
        """The first row of each req that fits what is held."""
        known: dict[ReqId, tuple[CommitRow, DraftReq]] = {}
        for row in round_.commit.rows:
            req = self._reqs.get(ReqKey(round_.target, row.req_id))
            if req is not None and row.req_id not in round_.needs_sync:
                known.setdefault(row.req_id, (row, req))
        return list(known.values())

    def _catch_up(self, wanted: Sequence[Wanted]) -> list[Sprout]:
        """One forward over committed tokens without KV, the shortest gaps first.

        Returns: the reqs that have caught up and may grow a tree.
        """
        budget = self._max_catch_up_tokens
        steps: list[ReqStep] = []
        chosen: list[Wanted] = []
        kept: list[DraftReq] = []
        for want in sorted(wanted, key=lambda want: len(want.req.ids) - want.req.kv_len):
            req = want.req
            if budget == 0 or not self._reqs.reserve(req, len(req.ids) + want.num_slots, kept):
                continue
            kept.append(req)
            extend_len = min(len(req.ids) - req.prefix_len, budget)
            budget -= extend_len
            steps.append(self._catch_up_row(req, extend_len))
            chosen.append(want)
        if not steps:
            return []
        sprouts: list[Sprout] = []
        for want, step, logits in zip(chosen, steps, self._runner.forward(steps), strict=True):
            req = want.req
            req.kv_len = step.prefix_len + len(step.input_ids)
            req.guessed_ids.clear()
            if len(step.input_ids) > 1:
                self._reqs.share_prefix(req)
            if step.num_logits:
                sprouts.append(Sprout(want, logits))
        return sprouts

    def _catch_up_row(self, req: DraftReq, extend_len: int) -> ReqStep:
        start = req.prefix_len
        stop = start + extend_len
        return self._runner.make_row(
            req,
            Phase.DECODE if extend_len == 1 else Phase.PREFILL,
            start,
            tuple(req.ids[start:stop]),
            num_logits=1 if stop == len(req.ids) else 0,
        )

    def _want(self, round_: Round, row: CommitRow, req: DraftReq) -> Wanted | None:
        """The tree to grow: as asked for, and within the draft's own shape and context."""
        # A level below the first takes a forward at position len(ids), len(ids) + 1, ...
        room = self.max_model_len - len(req.ids) + 1
        depth = min(self._shape.num_steps, round_.shape.num_steps, row.num_draft_tokens - 1, room)
        topk = min(self._shape.topk, round_.shape.topk)
        return Wanted(req, depth, topk, row.num_draft_tokens) if depth > 0 else None


def build_proposer(
    config: WorkerConfig,
    progress: Callable[[str, float], None] | None = None,
    *,
    listener: socket.socket | None = None,
) -> Proposer:
    """A draft rank's proposer; `config.model` is the draft's model. Ranks above 0 of a group need
    only its `executor.follow()`; `listener` is rank 0's socket, as for `build_executor`.

    Raises: ConfigError, Unavailable: as `build_executor`.
    """
    from paceline.worker.target.build import build_executor

    executor = build_executor(config, progress, listener=listener)
    scheduler = config.scheduler
    return Proposer(
        executor,
        config.spec,
        config.cache,
        config.model.max_model_len,
        scheduler.max_num_seqs,
        sampler=executor.sampler,
        max_catch_up_tokens=min(
            scheduler.chunked_prefill_size or scheduler.max_num_batched_tokens,
            scheduler.max_num_batched_tokens,
        ),
    )
