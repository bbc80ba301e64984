"""Rounds and answers survive the wire; a row that cannot be is left out alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protos.v1 import speculation_pb2 as pb
from paceline.worker.link import wire
from paceline.worker.link.base import Commit, CommitRow, ProposalRow, Proposals, SyncRow
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Epoch, ReqId

LIMITS = wire.RowLimits(vocab_size=100, max_num_reqs=8, max_model_len=64, num_draft_tokens=5)

req_ids = st.text(min_size=1, max_size=4).map(ReqId)
tokens = st.lists(st.integers(0, 99), min_size=1, max_size=8).map(tuple)
syncs = st.builds(
    SyncRow,
    req_id=req_ids,
    token_ids=tokens,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 8, width=32),
    top_k=st.integers(0, 200),
    top_p=st.floats(0.125, 1, width=32),
    min_p=st.floats(0, 1, width=32),
)
rows = st.builds(
    CommitRow,
    req_id=req_ids,
    base_len=st.integers(1, 50),
    token_ids=tokens,
    accept_length=st.integers(0, 4),
    num_draft_tokens=st.integers(0, 5),
)
trees = st.integers(0, 6).flatmap(
    lambda n: st.tuples(*(st.integers(0, i) for i in range(n))).map(
        lambda parents: DraftTree(tuple(range(len(parents))), parents)
    )
)
proposal_rows = st.builds(ProposalRow, req_ids, st.integers(1, 1 << 20), trees)


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.lists(syncs, max_size=4).map(tuple),
    st.lists(rows, max_size=4).map(tuple),
)
def test_a_round_survives_the_wire(
    epoch: int, number: int, sync_rows: tuple[SyncRow, ...], commit_rows: tuple[CommitRow, ...]
) -> None:
    commit = Commit(Epoch(epoch), number, sync_rows, commit_rows)
    message = pb.Commit.FromString(wire.commit_to_proto(commit).SerializeToString())
    assert wire.commit_from_proto(message, LIMITS) == (commit, ())


@given(st.lists(proposal_rows, max_size=4).map(tuple), st.lists(req_ids, max_size=3).map(tuple))
def test_an_answer_survives_the_wire(
    proposal: tuple[ProposalRow, ...], needs_sync: tuple[ReqId, ...]
) -> None:
    proposals = Proposals(Epoch(3), 7, proposal, needs_sync, draft_us=12)
    message = pb.Proposals.FromString(wire.proposals_to_proto(proposals).SerializeToString())
    assert wire.proposals_from_proto(message, vocab_size=100) == proposals


def test_a_negative_seed_is_sent_as_its_64_bits() -> None:
    sync = SyncRow(ReqId("a"), (1,), -1, 0.0, 0, 1.0, 0.0)
    assert wire.commit_to_proto(Commit(Epoch(1), 1, (sync,), ())).syncs[0].seed == 2**64 - 1


@pytest.mark.parametrize(
    "row",
    [
        pb.ProposalRow(token_ids=[1, 2], parents=[0]),
        pb.ProposalRow(token_ids=[1, 2], parents=[0, 2]),  # a parent behind its child
        pb.ProposalRow(token_ids=[1, 1], parents=[0, 0]),  # twice the same child
        pb.ProposalRow(token_ids=[100], parents=[0]),  # no such token
    ],
)
def test_a_malformed_tree_is_left_out_and_its_req_synced(row: pb.ProposalRow) -> None:
    row.req_id = "bad"
    good = pb.ProposalRow(req_id="good", commit_len=3, token_ids=[1], parents=[0])
    proposals = wire.proposals_from_proto(pb.Proposals(rows=[row, good]), vocab_size=100)
    assert [row.req_id for row in proposals.rows] == ["good"]
    assert proposals.needs_sync == ("bad",)


@given(
    st.builds(
        pb.SyncRow,
        req_id=st.just("a"),
        token_ids=st.lists(st.sampled_from([0, 99, 100, 2**32 - 1]), max_size=80),
        temperature=st.floats(width=32),
        top_k=st.integers(-5, 5),
        top_p=st.floats(width=32),
        min_p=st.floats(width=32),
    )
)
def test_what_passes_as_a_sync_is_sound(message: pb.SyncRow) -> None:
    commit, bad = wire.commit_from_proto(pb.Commit(syncs=[message]), LIMITS)
    assert len(commit.syncs) + len(bad) == 1
    for sync in commit.syncs:
        assert 0 < len(sync.token_ids) <= 64
        assert max(sync.token_ids) < 100
        assert 0 <= sync.temperature < math.inf
        assert sync.top_k >= 0
        assert 0 < sync.top_p <= 1
        assert 0 <= sync.min_p <= 1


def test_rows_beyond_the_limit_are_left_out() -> None:
    message = pb.Commit(
        rows=[pb.CommitRow(req_id=f"r{i}", base_len=1, num_draft_tokens=5) for i in range(10)]
    )
    commit, bad = wire.commit_from_proto(message, LIMITS)
    assert (len(commit.rows), bad) == (8, ("r8", "r9"))
