"""DraftSession: what one target believes its draft knows of each req. Pure.

It decides what a round must carry (a sync or the tokens since the last acknowledged length) and
which of the answer's trees may be used. It knows neither links nor models. Whatever arrives, in
whatever order, changes only which rows have a tree: a tree is used when epoch, round and
committed length are those asked for, and its form is sound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.worker.config import SpecConfig
from paceline.worker.link.base import Commit, CommitRow, ProposalRow, Proposals, SyncRow
from paceline.worker.spec.drafter import DraftContext
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId

_MAX_SKIPPED_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """A tree or None for each context of the round, in order, and what was thrown away."""

    trees: tuple[DraftTree | None, ...]
    num_stale: int = 0  # rows of another round, length or req
    num_malformed: int = 0
    num_needs_sync: int = 0


@dataclass(slots=True)
class _ReqView:
    # Tokens the draft holds as far as we know; 0 asks for a sync. Raised when a sync is sent, not
    # when it is answered: a draft that never got it says so, one that is slow is not sent it twice.
    known_len: int = 0
    strikes: int = 0  # failed syncs and malformed trees since the last good answer
    skip_until: int = 0  # the round that may ask again


class DraftSession:
    """The target's side of the exchange: `begin_round`, send, `finish_round`."""

    def __init__(
        self,
        spec: SpecConfig,
        *,
        vocab_size: int = 0,
        max_sync_tokens: int = 65_536,
        max_reqs: int = 4_096,
    ) -> None:
        """`vocab_size` 0 leaves token ids unchecked. A round syncs `max_sync_tokens` at most, but
        always one req; views of more than `max_reqs` reqs are forgotten, the stalest first."""
        self._spec = spec
        self._vocab_size = vocab_size
        self._max_sync_tokens = max_sync_tokens
        self._max_reqs = max_reqs
        self._views: dict[ReqId, _ReqView] = {}  # the most recently used last
        self._epoch: Epoch | None = None
        self._round = 0

    @property
    def num_reqs(self) -> int:
        return len(self._views)

    def begin_round(self, epoch: Epoch, contexts: Sequence[DraftContext]) -> Commit:
        """The next round's message; it has no rows when no context wants or may have a tree."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._views.clear()
        self._round += 1
        syncs: list[SyncRow] = []
        rows: list[CommitRow] = []
        sync_budget = self._max_sync_tokens
        for context in contexts:
            num_draft_tokens = min(context.max_draft_tokens, self._spec.num_draft_tokens)
            if num_draft_tokens < 2:
                continue
            view = self._touch(context.req_id)
            if self._round < view.skip_until:
                continue
            if not 0 < view.known_len <= context.commit_len:
                if syncs and context.commit_len > sync_budget:
                    continue
                sync_budget -= context.commit_len
                syncs.append(_sync_row(context))
                view.known_len = context.commit_len
            rows.append(
                CommitRow(
                    req_id=context.req_id,
                    base_len=view.known_len,
                    token_ids=_tokens_from(context, view.known_len),
                    accept_length=context.accept_length,
                    num_draft_tokens=num_draft_tokens,
                )
            )
        self._forget_stalest()
        return Commit(epoch, self._round, tuple(syncs), tuple(rows))

    def finish_round(
        self, contexts: Sequence[DraftContext], commit: Commit, proposals: Proposals | None
    ) -> RoundOutcome:
        """Takes the answer to `commit`, or None when there was none in time."""
        if proposals is None:
            return RoundOutcome((None,) * len(contexts))
        if (proposals.epoch, proposals.round) != (commit.epoch, commit.round):
            return RoundOutcome((None,) * len(contexts), num_stale=len(proposals.rows))
        asked = {row.req_id: row for row in commit.rows}
        synced = {row.req_id for row in commit.syncs}
        trees: dict[ReqId, DraftTree] = {}
        num_stale = num_malformed = 0
        for proposal in proposals.rows:
            row = asked.get(proposal.req_id)
            if row is None or row.req_id in trees or proposal.commit_len != row.commit_len:
                num_stale += 1
            elif not self._is_sound(proposal):
                num_malformed += 1
                self._strike(row.req_id)
            else:
                trees[row.req_id] = proposal.tree.truncate(row.num_draft_tokens)
                self._acknowledge(row)
        refused = [req_id for req_id in set(proposals.needs_sync) - set(trees) if req_id in asked]
        for req_id in refused:
            if req_id in synced:
                self._strike(req_id)
            elif view := self._views.get(req_id):
                view.known_len = 0
        return RoundOutcome(
            tuple(_guesses(trees.get(context.req_id)) for context in contexts),
            num_stale,
            num_malformed,
            len(refused),
        )

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        for req_id in req_ids:
            self._views.pop(req_id, None)

    def _touch(self, req_id: ReqId) -> _ReqView:
        view = self._views.pop(req_id, None) or _ReqView()
        self._views[req_id] = view
        return view

    def _forget_stalest(self) -> None:
        while len(self._views) > self._max_reqs:
            del self._views[next(iter(self._views))]

    def _is_sound(self, proposal: ProposalRow) -> bool:
        tree = proposal.tree
        if self._vocab_size and not all(0 <= t < self._vocab_size for t in tree.token_ids):
            return False
        return max(tree.depths(), default=0) <= self._spec.num_steps

    def _acknowledge(self, row: CommitRow) -> None:
        if view := self._views.get(row.req_id):
            view.known_len = row.commit_len
            view.strikes = 0

    def _strike(self, req_id: ReqId) -> None:
        """Begins again with a req, later each time: a bad row must not cost every round."""
        if view := self._views.get(req_id):
            view.known_len = 0
            view.strikes += 1
            view.skip_until = self._round + min(1 << view.strikes, _MAX_SKIPPED_ROUNDS)


def _guesses(tree: DraftTree | None) -> DraftTree | None:
    """A tree that is only a root acknowledges the tokens and guesses nothing."""
    return tree if tree is not None and tree.num_nodes > 1 else None


def _sync_row(context: DraftContext) -> SyncRow:
    params = context.params
    return SyncRow(
        req_id=context.req_id,
        token_ids=(*context.prompt_ids, *context.output_ids),
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )


def _tokens_from(context: DraftContext, start: int) -> tuple[int, ...]:
    """The committed tokens from position `start` on, without copying the rest."""
    prompt_len = len(context.prompt_ids)
    if start >= prompt_len:
        return tuple(context.output_ids[start - prompt_len :])
    return (*context.prompt_ids[start:], *context.output_ids)
