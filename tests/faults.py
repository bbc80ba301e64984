"""FaultyLink: a draft link that loses, delays, repeats, reorders and garbles, by a schedule."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.worker.link.base import (
    Commit,
    CommitRow,
    DraftLink,
    ProposalRow,
    Proposals,
    SyncRow,
)
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Faults:
    """Chance of each fault, per round and independent of the others."""

    lose_question: float = 0.0
    lose_answer: float = 0.0
    delay: float = 0.0  # the answer comes as that of the next round
    repeat: float = 0.0  # the draft gets the question twice
    reorder: float = 0.0  # the draft gets the question after the next one
    garble_question: float = 0.0
    garble_answer: float = 0.0
    lose_state: float = 0.0  # the draft forgets everything; the epoch rises

    @classmethod
    def all(cls, chance: float) -> "Faults":
        return cls(*[chance] * 8)


class FaultyLink(DraftLink):
    """Wraps a link. A delayed answer breaks the contract of `exchange` on purpose: a session must
    see for itself that it is stale."""

    def __init__(self, inner: DraftLink, faults: Faults, seed: int, vocab_size: int) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._late_question: Commit | None = None
        self._late_answer: Proposals | None = None
        self._epoch_offset = 0
        self._seen: set[ReqId] = set()
        self.num_faults = 0

    @property
    def epoch(self) -> Epoch:
        return Epoch(self._inner.epoch + self._epoch_offset)

    @property
    def is_up(self) -> bool:
        return self._inner.is_up

    def exchange(self, commit: Commit, timeout_s: float) -> Proposals | None:
        self._seen |= {row.req_id for row in commit.rows}
        if self._happens(self._faults.lose_state):
            self._inner.close_reqs(self._seen)
            self._epoch_offset += 1
            return None
        question = commit
        if self._happens(self._faults.garble_question):
            question = self._garbled_question(question)
        if self._happens(self._faults.reorder):
            self._late_question, question = question, self._late_question or question
        else:
            self._flush_late_question(timeout_s)
        if self._happens(self._faults.lose_question):
            return None
        if self._happens(self._faults.repeat):
            self._send(question, timeout_s)
        answer = self._send(question, timeout_s)
        if answer is not None and self._happens(self._faults.garble_answer):
            answer = self._garbled_answer(answer)
        if self._happens(self._faults.delay):
            self._late_answer, answer = answer, self._late_answer
        if self._happens(self._faults.lose_answer):
            return None
        return answer

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        closed = list(req_ids)
        self._late_question = None  # a stream keeps its order: nothing overtakes a close
        self._inner.close_reqs(closed)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _send(self, commit: Commit, timeout_s: float) -> Proposals | None:
        answer = self._inner.exchange(replace(commit, epoch=self._inner.epoch), timeout_s)
        if answer is None:
            return None
        return replace(answer, epoch=Epoch(answer.epoch + self._epoch_offset))

    def _flush_late_question(self, timeout_s: float) -> None:
        if self._late_question is not None:
            self._send(self._late_question, timeout_s)
            self._late_question = None

    def _happens(self, chance: float) -> bool:
        happens = self._random.random() < chance
        self.num_faults += happens
        return happens

    def _garbled_question(self, commit: Commit) -> Commit:
        if commit.syncs and self._random.random() < 0.5:
            return replace(commit, syncs=_replace_one(self._random, commit.syncs, self._bad_sync))
        if commit.rows:
            return replace(commit, rows=_replace_one(self._random, commit.rows, self._bad_row))
        return commit

    def _garbled_answer(self, answer: Proposals) -> Proposals:
        if not answer.rows or self._random.random() < 0.3:
            return replace(answer, needs_sync=(*answer.needs_sync, ReqId("nobody"), *self._seen))
        return replace(answer, rows=_replace_one(self._random, answer.rows, self._bad_proposal))

    def _bad_sync(self, sync: SyncRow) -> SyncRow:
        tokens = list(sync.token_ids)
        tokens[self._random.randrange(len(tokens))] = self._random.randrange(self._vocab_size)
        return self._random.choice(
            [
                replace(sync, token_ids=tuple(tokens)),
                replace(sync, token_ids=tuple(tokens[:-1])) if len(tokens) > 1 else sync,
                replace(sync, seed=sync.seed ^ 1),
            ]
        )

    def _bad_row(self, row: CommitRow) -> CommitRow:
        some = tuple(self._random.randrange(self._vocab_size) for _ in range(3))
        return self._random.choice(
            [
                replace(row, base_len=row.base_len + self._random.choice((-2, -1, 1, 2))),
                replace(row, token_ids=row.token_ids + some),
                replace(row, token_ids=some),
                replace(row, req_id=ReqId("nobody")),
                replace(row, num_draft_tokens=self._random.randrange(8)),
            ]
        )

    def _bad_proposal(self, row: ProposalRow) -> ProposalRow:
        wrong = self._vocab_size + self._random.randrange(3)
        return self._random.choice(
            [
                replace(row, commit_len=row.commit_len + self._random.choice((-1, 1))),
                replace(row, req_id=ReqId("nobody")),
                replace(row, tree=DraftTree.chain([wrong])),
                replace(row, tree=DraftTree.chain(range(40))),
                replace(row, tree=DraftTree((), ())),
            ]
        )


def _replace_one(
    rng: random.Random, rows: Sequence[Row], change: Callable[[Row], Row]
) -> tuple[Row, ...]:
    changed = list(rows)
    i = rng.randrange(len(changed))
    changed[i] = change(changed[i])
    return tuple(changed)
