"""What a draft stream has still to send: the latest round, bounded, in an order that is safe."""

import threading

from paceline.protos.v1 import speculation_pb2 as pb
from paceline.worker.link.outbox import Outbox
from paceline.worker.step import ReqId


def begin() -> Outbox:
    outbox = Outbox(pb.Attach(version=1))
    assert next(outbox).WhichOneof("message") == "attach"
    return outbox


def test_the_latest_round_wins() -> None:
    outbox = begin()
    outbox.put_commit(pb.Commit(round=1))
    outbox.put_commit(pb.Commit(round=2))
    assert next(outbox).commit.round == 2


def test_a_round_never_overtakes_a_close() -> None:
    """What waits before a close is over: sent after it, it would bring the req back."""
    outbox = begin()
    outbox.put_commit(pb.Commit(round=1))
    outbox.put_closed_reqs([ReqId("a"), ReqId("b"), ReqId("a")])
    outbox.put_commit(pb.Commit(round=2))
    assert list(next(outbox).close.req_ids) == ["a", "b"]
    assert next(outbox).commit.round == 2


def test_closed_reqs_are_bounded_and_go_out_in_pieces() -> None:
    outbox = begin()
    for i in range(70_000):
        outbox.put_closed_reqs([ReqId(f"r{i}")])
    sizes = []
    while not sizes or sizes[-1] == 4_096:
        outbox.put_commit(pb.Commit(round=1))
        request = next(outbox)
        if request.WhichOneof("message") == "commit":
            break
        sizes.append(len(request.close.req_ids))
    assert sum(sizes) == 65_536


def test_a_reader_that_waits_ends_when_the_outbox_is_closed() -> None:
    outbox = begin()
    reader = threading.Thread(target=lambda: list(outbox))
    reader.start()
    outbox.close()
    reader.join(timeout=5)
    assert not reader.is_alive()
