"""Target and draft over real gRPC: what is proposed, refused, shared, freed, and lost."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos.v1 import admin_pb2, admin_pb2_grpc
from paceline.protos.v1 import speculation_pb2 as pb
from paceline.protos.v1 import speculation_pb2_grpc as pb_grpc
from paceline.worker.draft.proposer import build_proposer
from paceline.worker.errors import Unavailable
from paceline.worker.link import wire
from paceline.worker.link.base import Commit, CommitRow, Proposals, SyncRow
from paceline.worker.link.grpc_link import GrpcLink
from paceline.worker.link.local_link import LocalLink
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.vocab import vocab_hash
from paceline.worker.step import Epoch, ReqId, SamplingParams
from tests.draft_host import SPEC, DraftHost, draft_config, draft_host, make_server
from tests.polling import wait_for
from tests.spec_harness import GREEDY, SAMPLED, SoloTarget, worker_config
from tests.tiny import VOCAB_SIZE

PROMPTS = [[1, 5, 9, 44, 60, 100, 7], [1, *range(20, 60)], [3]]
SYNC = SyncRow(ReqId("a"), (1, 5, 9, 44), 3, 0.8, 0, 1.0, 0.0)


@contextmanager
def grpc_link(address: str, model: Path, **changes: object) -> Iterator[GrpcLink]:
    arguments = {
        "target_group_id": "target-0",
        "vocab_hash": vocab_hash(model),
        "vocab_size": VOCAB_SIZE,
        "spec": SPEC,
        "max_num_reqs": 8,
        "max_model_len": 128,
        "max_backoff_s": 0.2,
    }
    link = GrpcLink(address, **(arguments | changes))  # type: ignore[arg-type]  # a test's mix
    try:
        yield link
    finally:
        link.shutdown()


TREE = replace(SPEC, num_steps=3, topk=2, num_draft_tokens=8)


@pytest.fixture(scope="module")
def host(tiny_draft: Path) -> Iterator[DraftHost]:
    with draft_host(tiny_draft) as host:
        yield host


@pytest.fixture(scope="module")
def tree_host(tiny_model: Path) -> Iterator[DraftHost]:
    with draft_host(tiny_model, TREE) as host:
        yield host


def snapshot(host: DraftHost) -> admin_pb2.SnapshotResponse:
    with grpc.insecure_channel(host.address) as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).Snapshot(
            admin_pb2.SnapshotRequest(), timeout=5
        )


def holds_nothing(host: DraftHost) -> bool:
    held = snapshot(host)
    return (
        not held.running_req_ids
        and held.num_free_pages + held.num_cached_pages == held.num_pages
        and held.num_orphaned_pages == 0
    )


def ask(number: int, base_len: int = 4, epoch: int = 1, *, sync: bool = False) -> Commit:
    row = CommitRow(ReqId("a"), base_len, (), 0, 5)
    return Commit(Epoch(epoch), number, (SYNC,) if sync else (), (row,))


# ---- the exchange


def test_grpc_gives_the_trees_that_a_local_draft_gives(host: DraftHost, tiny_draft: Path) -> None:
    local = LocalLink(build_proposer(draft_config(tiny_draft)))
    sampled = replace(SYNC, temperature=0.75)
    with grpc_link(host.address, tiny_draft) as link:
        assert link.wait_until_up(10)
        for number, ids in enumerate([(1, 5, 9, 44), (1, 5, 9, 44, 7), (1, 5, 9, 44, 7, 3, 2)]):
            commit = Commit(
                Epoch(1),
                number + 1,
                (replace(sampled, token_ids=ids),),
                (CommitRow(ReqId("a"), len(ids), (), 0, 5),),
            )
            ours, theirs = local.exchange(commit, 5.0), link.exchange(commit, 5.0)
            assert ours is not None
            assert theirs is not None
            assert theirs.draft_us > 0
            assert replace(theirs, draft_us=0) == replace(ours, draft_us=0)
            assert ours.rows[0].tree.num_nodes == 5
    local.shutdown()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_output_over_grpc_is_that_of_plain_decoding(
    host: DraftHost, tiny_model: Path, params: SamplingParams
) -> None:
    target = SoloTarget(worker_config(tiny_model, spec=SPEC, num_pages=256))
    plain = target.run(PROMPTS, params)
    with grpc_link(host.address, tiny_model) as link:
        assert link.wait_until_up(10)
        drafter = LinkDrafter(link, SPEC, vocab_size=VOCAB_SIZE)
        got = target.run(PROMPTS, params, drafter)
        assert [req.output_ids for req in got] == [req.output_ids for req in plain]
        assert drafter.counters().num_draft_rows > 60
        wait_for(lambda: holds_nothing(host))
    target.shutdown()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_output_with_trees_over_grpc_is_that_of_plain_decoding(
    tree_host: DraftHost, tiny_model: Path, params: SamplingParams
) -> None:
    target = SoloTarget(worker_config(tiny_model, spec=TREE, num_pages=256))
    plain = target.run(PROMPTS, params)
    with grpc_link(tree_host.address, tiny_model, spec=TREE) as link:
        assert link.wait_until_up(10)
        got = target.run(PROMPTS, params, LinkDrafter(link, TREE, vocab_size=VOCAB_SIZE))
    assert [req.output_ids for req in got] == [req.output_ids for req in plain]
    assert sum(sum(req.accept_lengths) for req in got) > 100
    target.shutdown()


def test_a_target_gets_trees_of_the_shape_it_asked_for(
    tree_host: DraftHost, tiny_model: Path
) -> None:
    narrow = replace(SPEC, num_steps=2, topk=1, num_draft_tokens=3)
    wide = replace(SPEC, num_steps=9, topk=9, num_draft_tokens=40)
    trees = []
    for spec in (narrow, wide):
        with grpc_link(tree_host.address, tiny_model, spec=spec) as link:
            assert link.wait_until_up(10)
            row = CommitRow(ReqId("a"), 4, (), 0, spec.num_draft_tokens)
            answer = link.exchange(Commit(Epoch(1), 1, (SYNC,), (row,)), 5.0)
            assert answer is not None
            trees.append(answer.rows[0].tree)
    assert trees[0].is_chain
    assert trees[0].num_nodes == 3
    assert max(trees[1].depths()) == TREE.num_steps  # no more than the draft was started for
    assert max(trees[1].parents.count(parent) for parent in trees[1].parents) == TREE.topk


def test_two_targets_use_one_draft_and_the_same_req_ids(host: DraftHost, tiny_model: Path) -> None:
    """Each is a thread of its own; what they hold is apart, and freed when its stream ends."""
    outputs: dict[int, list[list[int]]] = {}

    def run(number: int) -> None:
        target = SoloTarget(worker_config(tiny_model, spec=SPEC, num_pages=256))
        prompts = [[*ids, number] for ids in PROMPTS]
        with grpc_link(host.address, tiny_model, target_group_id=f"target-{number}") as link:
            assert link.wait_until_up(10)
            drafter = LinkDrafter(link, SPEC)
            outputs[number] = [req.output_ids for req in target.run(prompts, SAMPLED, drafter)]
            outputs[-number] = [req.output_ids for req in target.run(prompts, SAMPLED)]
            assert drafter.counters().num_draft_rows > 60
        target.shutdown()

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert outputs[1] == outputs[-1]
    assert outputs[2] == outputs[-2]
    assert outputs[1] != outputs[2]
    wait_for(lambda: holds_nothing(host))


def test_a_stream_that_ends_frees_its_reqs(host: DraftHost, tiny_draft: Path) -> None:
    with grpc_link(host.address, tiny_draft) as link:
        assert link.wait_until_up(10)
        assert link.exchange(ask(1, sync=True), 5.0) is not None
        assert list(snapshot(host).running_req_ids) == ["a"]
        assert snapshot(host).draft_attached
    wait_for(lambda: holds_nothing(host))


def test_a_target_that_attaches_again_takes_the_place_of_its_stream(
    host: DraftHost, tiny_draft: Path
) -> None:
    with grpc_link(host.address, tiny_draft, max_backoff_s=60, first_backoff_s=60) as old:
        assert old.wait_until_up(10)
        with grpc_link(host.address, tiny_draft) as new:
            assert new.wait_until_up(10)
            wait_for(lambda: not old.is_up)
            assert old.exchange(ask(1, sync=True), 5.0) is None
            assert new.exchange(ask(1, sync=True), 5.0) is not None


# ---- bad input


def raw_stream(host: DraftHost, *requests: pb.SpeculateRequest) -> list[pb.SpeculateResponse]:
    with grpc.insecure_channel(host.address) as channel:
        call = pb_grpc.SpeculationServiceStub(channel).Speculate(iter(requests), timeout=10)
        return list(call)


def attach_message(model: Path, **changes: object) -> pb.SpeculateRequest:
    fields = {
        "version": 1, "target_group_id": "raw", "vocab_hash": vocab_hash(model),
        "vocab_size": VOCAB_SIZE, "max_num_reqs": 4, "max_model_len": 64, "num_steps": 4,
        "topk": 1, "num_draft_tokens": 5, "epoch": 9,
    }  # fmt: skip
    return pb.SpeculateRequest(attach=pb.Attach(**(fields | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"vocab_hash": b"other"}, grpc.StatusCode.FAILED_PRECONDITION, "vocabulary"),
        ({"vocab_size": 7}, grpc.StatusCode.FAILED_PRECONDITION, "vocabulary"),
        ({"version": 2}, grpc.StatusCode.FAILED_PRECONDITION, "version 2"),
        ({"target_group_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "target_group_id"),
        ({"max_model_len": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_model_len"),
        ({"num_draft_tokens": 1}, grpc.StatusCode.INVALID_ARGUMENT, "num_draft_tokens 1"),
    ],
)
def test_an_attach_that_cannot_be_is_refused_with_the_reason(
    host: DraftHost, tiny_draft: Path, changes: dict[str, object], code: object, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as refusal:
        raw_stream(host, attach_message(tiny_draft, **changes))
    assert refusal.value.code() == code  # type: ignore[attr-defined]  # a Call as well
    assert text in refusal.value.details()  # type: ignore[attr-defined]  # a Call as well


def test_a_stream_must_begin_with_an_attach(host: DraftHost) -> None:
    with pytest.raises(grpc.RpcError, match="first message"):
        raw_stream(host, pb.SpeculateRequest(commit=pb.Commit(epoch=1, round=1)))


def test_a_wrong_vocabulary_keeps_the_link_down_and_says_why(
    host: DraftHost, tiny_draft: Path
) -> None:
    with grpc_link(host.address, tiny_draft, vocab_hash=b"other") as link:
        assert not link.wait_until_up(10)
        assert "use a draft with the target's tokenizer" in link.refusal
        started_s = time.monotonic()
        assert link.exchange(ask(1, sync=True), 5.0) is None
        assert time.monotonic() - started_s < 1.0


def test_a_link_that_cannot_read_an_answer_connects_again(
    host: DraftHost,
    tiny_draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = wire.proposals_from_proto

    def fail_once(message: pb.Proposals, vocab_size: int) -> Proposals:
        monkeypatch.setattr(wire, "proposals_from_proto", read)
        raise ValueError("a defect")

    monkeypatch.setattr(wire, "proposals_from_proto", fail_once)
    with grpc_link(host.address, tiny_draft) as link:
        assert link.wait_until_up(10)
        assert link.exchange(ask(1, sync=True), 5.0) is None
        wait_for(lambda: link.is_up and link.epoch == 2)
        assert link.exchange(ask(1, epoch=2, sync=True), 5.0) is not None
    assert "a defect" in caplog.text


def test_bad_rows_are_left_out_and_the_stream_lives(host: DraftHost, tiny_draft: Path) -> None:
    good = pb.SyncRow(req_id="good", token_ids=[1, 2, 3], top_p=1.0)
    syncs = [
        pb.SyncRow(req_id="empty", top_p=1.0),
        pb.SyncRow(req_id="vocab", token_ids=[VOCAB_SIZE], top_p=1.0),
        pb.SyncRow(req_id="long", token_ids=[1] * 65, top_p=1.0),
        pb.SyncRow(req_id="nan", token_ids=[1], top_p=1.0, temperature=float("nan")),
        pb.SyncRow(req_id="top_p", token_ids=[1], top_p=2.0),
        good,
    ]
    rows = [
        pb.CommitRow(req_id=sync.req_id, base_len=len(sync.token_ids), num_draft_tokens=5)
        for sync in syncs
    ]
    rows.insert(0, pb.CommitRow(req_id="wide", base_len=3, num_draft_tokens=99))
    commits = [
        pb.Commit(epoch=8, round=1, syncs=syncs, rows=rows),  # another epoch: ignored
        pb.Commit(epoch=9, round=2, syncs=syncs, rows=rows),
    ]
    answers: list[pb.SpeculateResponse] = []
    done = threading.Event()

    def requests() -> Iterator[pb.SpeculateRequest]:
        yield attach_message(tiny_draft)
        yield pb.SpeculateRequest()  # nothing at all
        for commit in commits:
            yield pb.SpeculateRequest(commit=commit)
        done.wait(10)

    with grpc.insecure_channel(host.address) as channel:
        for response in pb_grpc.SpeculationServiceStub(channel).Speculate(requests(), timeout=10):
            answers.append(response)
            if response.WhichOneof("message") == "proposals":
                done.set()
                break
    assert answers[0].attached.draft_group_id == "draft-0"
    proposals = answers[1].proposals
    assert (proposals.epoch, proposals.round) == (9, 2)
    assert [row.req_id for row in proposals.rows] == ["good"]
    assert len(proposals.rows[0].token_ids) == 4


def test_a_port_in_use_is_said_so(host: DraftHost, tiny_draft: Path) -> None:
    server = make_server(tiny_draft, host.proposer, VOCAB_SIZE)
    with pytest.raises(Unavailable, match=f"cannot listen at 127.0.0.1:{host.port}"):
        host.call(server.start("127.0.0.1", host.port))


def test_a_link_that_pings_often_is_not_sent_away(host: DraftHost, tiny_draft: Path) -> None:
    """A server with gRPC's default number of ping strikes ends this stream after 5 s."""
    release = threading.Event()

    def requests() -> Iterator[pb.SpeculateRequest]:
        yield attach_message(tiny_draft)
        release.wait(10)

    options = (("grpc.keepalive_time_ms", 100), ("grpc.http2.max_pings_without_data", 0))
    with grpc.insecure_channel(host.address, options) as channel:
        call = pb_grpc.SpeculationServiceStub(channel).Speculate(requests(), timeout=5.5)
        assert next(call).WhichOneof("message") == "attached"
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        release.set()


# ---- health


def test_health_serves_until_the_server_stops(tiny_draft: Path) -> None:
    request = health_pb2.HealthCheckRequest(service="paceline.v1.SpeculationService")
    with draft_host(tiny_draft) as host, grpc.insecure_channel(host.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING


def test_a_lost_device_ends_streams_and_shows_in_health(tiny_draft: Path) -> None:
    request = health_pb2.HealthCheckRequest()
    with draft_host(tiny_draft) as host, grpc_link(host.address, tiny_draft) as link:
        assert link.wait_until_up(10)

        def fail(plan: object) -> None:
            raise RuntimeError("the device is on fire")

        host.proposer.executor.forward = fail  # type: ignore[assignment,method-assign]
        assert link.exchange(ask(1, sync=True), 5.0) is None
        wait_for(lambda: not link.is_up)
        host.call(host.server.wait_for_failure())
        with grpc.insecure_channel(host.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
            wait_for(lambda: stub.Check(request, timeout=5).status == not_serving)
