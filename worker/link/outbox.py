"""Outbox: what a stream has still to send, bounded. Any thread writes, the stream's reads."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator

from paceline.protos.v1 import speculation_pb2 as pb
from paceline.worker.step import ReqId

# Rounds that wait to be written at most. More means that the peer takes no bytes; the oldest is
# then dropped, since a later round says all that an earlier one said or is answered with a sync.
_MAX_WAITING_ROUNDS = 2

_MAX_REQ_IDS_PER_MESSAGE = 4_096
# Closed reqs that wait; a draft that is not told of one evicts it in time.
_MAX_CLOSED_REQS = 65_536


class Outbox(Iterator[pb.SpeculateRequest]):
    """The request iterator of one Speculate call; ends when closed."""

    def __init__(self, attach: pb.Attach) -> None:
        self._changed = threading.Condition()
        self._attach: pb.Attach | None = attach
        self._commits: deque[pb.Commit] = deque(maxlen=_MAX_WAITING_ROUNDS)
        self._closed_req_ids: dict[ReqId, None] = {}
        self._is_closed = False

    def put_commit(self, commit: pb.Commit) -> None:
        with self._changed:
            self._commits.append(commit)
            self._changed.notify()

    def put_closed_reqs(self, req_ids: Iterable[ReqId]) -> None:
        with self._changed:
            self._closed_req_ids.update(dict.fromkeys(req_ids))
            while len(self._closed_req_ids) > _MAX_CLOSED_REQS:
                del self._closed_req_ids[next(iter(self._closed_req_ids))]
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def __next__(self) -> pb.SpeculateRequest:
        with self._changed:
            while True:
                if self._is_closed:
                    raise StopIteration
                if self._attach is not None:
                    attach, self._attach = self._attach, None
                    return pb.SpeculateRequest(attach=attach)
                # Closed reqs first: a req id may come back in the round behind them.
                if self._closed_req_ids:
                    return pb.SpeculateRequest(close=pb.CloseReqs(req_ids=self._take_closed()))
                if self._commits:
                    return pb.SpeculateRequest(commit=self._commits.popleft())
                self._changed.wait()

    def _take_closed(self) -> list[str]:
        taken = list(self._closed_req_ids)[:_MAX_REQ_IDS_PER_MESSAGE]
        for req_id in taken:
            del self._closed_req_ids[req_id]
        return [str(req_id) for req_id in taken]
