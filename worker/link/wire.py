"""Speculation messages ⇄ dataclasses; the only Python of the exchange that knows both.

Reading is row by row: a row that cannot be is left out and named, the rest of its round lives.
"""

import math
from dataclasses import dataclass

from paceline.protos.v1 import speculation_pb2 as pb
from paceline.worker.link.base import Commit, CommitRow, ProposalRow, Proposals, SyncRow
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId

PROTOCOL_VERSION = 1

# Of one message, both ways: a round that syncs many long prompts is a few MB.
MAX_MESSAGE_BYTES = 64 << 20

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What an Attach allowed its rounds; rows beyond are left out."""

    vocab_size: int
    max_num_reqs: int
    max_model_len: int
    num_draft_tokens: int


def commit_to_proto(commit: Commit) -> pb.Commit:
    return pb.Commit(
        epoch=commit.epoch,
        round=commit.round,
        syncs=[
            pb.SyncRow(
                req_id=sync.req_id,
                token_ids=sync.token_ids,
                seed=sync.seed & _SEED_MASK,
                temperature=sync.temperature,
                top_k=sync.top_k,
                top_p=sync.top_p,
                min_p=sync.min_p,
            )
            for sync in commit.syncs
        ],
        rows=[
            pb.CommitRow(
                req_id=row.req_id,
                base_len=row.base_len,
                token_ids=row.token_ids,
                accept_length=row.accept_length,
                num_draft_tokens=row.num_draft_tokens,
            )
            for row in commit.rows
        ],
    )


def commit_from_proto(message: pb.Commit, limits: RowLimits) -> tuple[Commit, tuple[ReqId, ...]]:
    """The sound rows of a round, and the reqs of those that are not."""
    syncs: list[SyncRow] = []
    rows: list[CommitRow] = []
    bad: list[ReqId] = []
    for sync in message.syncs:
        if len(syncs) < limits.max_num_reqs and _is_sound_sync(sync, limits):
            syncs.append(_sync_from_proto(sync))
        else:
            bad.append(ReqId(sync.req_id))
    for row in message.rows:
        if len(rows) < limits.max_num_reqs and _is_sound_row(row, limits):
            rows.append(_row_from_proto(row))
        else:
            bad.append(ReqId(row.req_id))
    return Commit(Epoch(message.epoch), message.round, tuple(syncs), tuple(rows)), tuple(bad)


def proposals_to_proto(proposals: Proposals) -> pb.Proposals:
    return pb.Proposals(
        epoch=proposals.epoch,
        round=proposals.round,
        rows=[
            pb.ProposalRow(
                req_id=row.req_id,
                commit_len=row.commit_len,
                token_ids=row.tree.token_ids,
                parents=row.tree.parents,
            )
            for row in proposals.rows
        ],
        needs_sync=proposals.needs_sync,
        draft_us=proposals.draft_us,
    )


def proposals_from_proto(message: pb.Proposals, vocab_size: int) -> Proposals:
    """An answer; a req whose tree is malformed counts as one that must be synced again."""
    rows: list[ProposalRow] = []
    needs_sync = [ReqId(req_id) for req_id in message.needs_sync]
    for row in message.rows:
        req_id = ReqId(row.req_id)
        tree = _tree_from_proto(row, vocab_size)
        if tree is None:
            needs_sync.append(req_id)
        else:
            rows.append(ProposalRow(req_id, row.commit_len, tree))
    return Proposals(
        Epoch(message.epoch), message.round, tuple(rows), tuple(needs_sync), message.draft_us
    )


def _tree_from_proto(row: pb.ProposalRow, vocab_size: int) -> DraftTree | None:
    if max(row.token_ids, default=0) >= vocab_size:
        return None
    try:
        return DraftTree(tuple(row.token_ids), tuple(row.parents))
    except ValueError:
        return None


def _is_sound_sync(sync: pb.SyncRow, limits: RowLimits) -> bool:
    params = (sync.temperature, sync.top_p, sync.min_p)
    return (
        0 < len(sync.token_ids) <= limits.max_model_len
        and max(sync.token_ids) < limits.vocab_size
        and all(map(math.isfinite, params))
        and sync.temperature >= 0
        and sync.top_k >= -1
        and 0 < sync.top_p <= 1
        and 0 <= sync.min_p <= 1
    )


def _is_sound_row(row: pb.CommitRow, limits: RowLimits) -> bool:
    return (
        row.base_len > 0
        and row.base_len + len(row.token_ids) <= limits.max_model_len
        and max(row.token_ids, default=0) < limits.vocab_size
        and row.num_draft_tokens <= limits.num_draft_tokens
    )


def _sync_from_proto(sync: pb.SyncRow) -> SyncRow:
    return SyncRow(
        req_id=ReqId(sync.req_id),
        token_ids=tuple(sync.token_ids),
        seed=sync.seed,
        temperature=sync.temperature,
        top_k=max(sync.top_k, 0),
        top_p=sync.top_p,
        min_p=sync.min_p,
    )


def _row_from_proto(row: pb.CommitRow) -> CommitRow:
    return CommitRow(
        req_id=ReqId(row.req_id),
        base_len=row.base_len,
        token_ids=tuple(row.token_ids),
        accept_length=row.accept_length,
        num_draft_tokens=row.num_draft_tokens,
    )
