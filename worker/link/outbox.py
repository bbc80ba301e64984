"""Outbox: what a stream has still to send, bounded. Any thread writes, the stream's reads."""

import threading
from collections.abc import Iterable, Iterator

from paceline.protos.v1 import speculation_pb2 as pb
from paceline.worker.step import ReqId

_MAX_REQ_IDS_PER_MESSAGE = 4_096
# Closed reqs that wait; a draft that is not told of one evicts it in time.
_MAX_CLOSED_REQS = 65_536


class Outbox(Iterator[pb.SpeculateRequest]):
    """The request iterator of one Speculate call; ends when closed.

    A round that still waits when its target says something else is over: it is dropped, and what
    the draft missed of it is asked for by the draft. So a round never overtakes a close.
    """

    def __init__(self, attach: pb.Attach) -> None:
        self._changed = threading.Condition()
        self._attach: pb.Attach | None = attach
        self._commit: pb.Commit | None = None
        self._closed_req_ids: dict[ReqId, None] = {}
        self._is_closed = False

    def put_commit(self, commit: pb.Commit) -> None:
        with self._changed:
            self._commit = commit
            self._changed.notify()

    def put_closed_reqs(self, req_ids: Iterable[ReqId]) -> None:
        with self._changed:
            self._commit = None
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
                if self._closed_req_ids:
                    return pb.SpeculateRequest(close=pb.CloseReqs(req_ids=self._take_closed()))
                if self._commit is not None:
                    commit, self._commit = self._commit, None
                    return pb.SpeculateRequest(commit=commit)
                self._changed.wait()

    def _take_closed(self) -> list[str]:
        taken = list(self._closed_req_ids)[:_MAX_REQ_IDS_PER_MESSAGE]
        for req_id in taken:
            del self._closed_req_ids[req_id]
        return [str(req_id) for req_id in taken]
