"""GrpcLink: the exchange with a draft in another process, over one Speculate stream.

A background thread connects, attaches, reads answers, and connects again when the stream breaks.
The step thread only hands a round over and waits, at most its timeout. Synchronous gRPC: its
round trip is a little shorter than that of an asyncio loop beside the step thread.
"""

import logging
import threading
import time
from collections.abc import Iterable

import grpc

from paceline.protos.v1 import speculation_pb2 as pb
from paceline.protos.v1.speculation_pb2_grpc import SpeculationServiceStub
from paceline.worker.config import SpecConfig
from paceline.worker.link import wire
from paceline.worker.link.base import Commit, DraftLink, Proposals
from paceline.worker.link.channel_options import LINK_OPTIONS
from paceline.worker.link.outbox import Outbox
from paceline.worker.step import Epoch, ReqId

log = logging.getLogger(__name__)

# Refusals that will not change by themselves soon; anything else is tried again quickly.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)


class GrpcLink(DraftLink):
    """One target's link to the draft leader at `address` ("host:port").

    Connecting starts at once and never ends before `shutdown`: pauses between attempts double
    from `first_backoff_s` to `max_backoff_s`, and are `max_backoff_s` after a refusal. The first
    attach has epoch `epoch`, each later one the next.
    """

    def __init__(
        self,
        address: str,
        *,
        target_group_id: str,
        vocab_hash: bytes,
        vocab_size: int,
        spec: SpecConfig,
        max_num_reqs: int = 256,
        max_model_len: int = 1 << 20,
        epoch: Epoch = Epoch(1),  # noqa: B008 - a NewType of int
        credentials: grpc.ChannelCredentials | None = None,
        attach_timeout_s: float = 5.0,
        first_backoff_s: float = 0.05,
        max_backoff_s: float = 5.0,
    ) -> None:
        self._address = address
        self._attach = pb.Attach(
            version=wire.PROTOCOL_VERSION,
            target_group_id=target_group_id,
            vocab_hash=vocab_hash,
            vocab_size=vocab_size,
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            num_steps=spec.num_steps,
            topk=spec.topk,
            num_draft_tokens=spec.num_draft_tokens,
        )
        self._credentials = credentials
        self._attach_timeout_s = attach_timeout_s
        self._first_backoff_s = first_backoff_s
        self._max_backoff_s = max_backoff_s

        self._changed = threading.Condition()  # guards all below
        self._epoch = epoch
        self._next_epoch = epoch
        self._is_up = False
        self._is_stopping = False
        self._refusal = ""
        self._outbox: Outbox | None = None
        self._call: grpc.Call | None = None
        self._awaited: tuple[Epoch, int] | None = None
        self._answer: Proposals | None = None

        self._thread = threading.Thread(target=self._run, name="draft-link", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def is_up(self) -> bool:
        return self._is_up

    @property
    def refusal(self) -> str:
        return self._refusal

    def wait_until_up(self, timeout_s: float) -> bool:
        """False when the link did not come up in time or was refused; for starts and tests."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_up or bool(self._refusal), timeout_s)
            return self._is_up

    def exchange(self, commit: Commit, timeout_s: float) -> Proposals | None:
        deadline_s = time.monotonic() + timeout_s
        message = wire.commit_to_proto(commit)
        key = (commit.epoch, commit.round)
        with self._changed:
            if not self._is_up or commit.epoch != self._epoch or self._outbox is None:
                return None
            self._awaited, self._answer = key, None
            self._outbox.put_commit(message)
            while self._answer is None and self._is_up and self._epoch == commit.epoch:
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0 or not self._changed.wait(remaining_s):
                    break
            answer, self._awaited, self._answer = self._answer, None, None
            return answer

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        with self._changed:
            if self._outbox is not None:  # a stream that breaks frees its reqs itself
                self._outbox.put_closed_reqs(req_ids)

    def shutdown(self) -> None:
        with self._changed:
            self._is_stopping = True
            call, outbox = self._call, self._outbox
            self._changed.notify_all()
        if outbox is not None:
            outbox.close()
        if call is not None:
            call.cancel()
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            log.warning("draft link did not stop in time address=%s", self._address)

    # ---- the link's own thread

    def _run(self) -> None:
        backoff_s = self._first_backoff_s
        while not self._is_stopping:
            try:
                was_up, refused = self._run_stream()
            except Exception:  # the thread's boundary: a link that ended would never come back
                log.exception("draft link failed address=%s", self._address)
                was_up = refused = False
            if was_up:
                backoff_s = self._first_backoff_s
            with self._changed:
                pause_s = self._max_backoff_s if refused else backoff_s
                self._changed.wait_for(lambda: self._is_stopping, pause_s)
            backoff_s = min(backoff_s * 2, self._max_backoff_s)

    def _run_stream(self) -> tuple[bool, bool]:
        """One stream from connect to break. Returns whether it was up, and if it was refused."""
        outbox = Outbox(self._begin_attach())
        channel = self._connect()
        call = SpeculationServiceStub(channel).Speculate(outbox)
        attach_timer = threading.Timer(self._attach_timeout_s, call.cancel)
        attach_timer.daemon = True
        attach_timer.start()
        was_up = refused = False
        try:
            with self._changed:
                self._call, self._outbox = call, outbox
                if self._is_stopping:
                    call.cancel()
            for response in call:
                kind = response.WhichOneof("message")
                if kind == "attached" and not was_up:
                    attach_timer.cancel()
                    was_up = True
                    self._come_up(response.attached)
                elif kind == "proposals":
                    self._deliver(
                        wire.proposals_from_proto(response.proposals, self._attach.vocab_size)
                    )
            self._note_break(grpc.StatusCode.OK, "the draft ended the stream", was_up=was_up)
        except grpc.RpcError:
            refused = self._note_break(call.code(), call.details() or "", was_up=was_up)
        finally:
            attach_timer.cancel()
            self._go_down()
            outbox.close()
            channel.close()
        return was_up, refused

    def _connect(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self._address, options=LINK_OPTIONS)
        return grpc.secure_channel(self._address, self._credentials, options=LINK_OPTIONS)

    def _begin_attach(self) -> pb.Attach:
        attach = pb.Attach()
        attach.CopyFrom(self._attach)
        with self._changed:
            attach.epoch = self._next_epoch
        return attach

    def _come_up(self, attached: pb.Attached) -> None:
        with self._changed:
            self._epoch = self._next_epoch
            self._next_epoch = Epoch(self._next_epoch + 1)
            self._is_up = True
            self._refusal = ""
            self._changed.notify_all()
        log.info(
            "draft attached address=%s group=%s epoch=%d max_model_len=%d",
            self._address, attached.draft_group_id, self._epoch, attached.max_model_len,
        )  # fmt: skip

    def _go_down(self) -> None:
        with self._changed:
            self._is_up = False
            self._call = self._outbox = None
            self._changed.notify_all()

    def _deliver(self, proposals: Proposals) -> None:
        with self._changed:
            if (proposals.epoch, proposals.round) == self._awaited:
                self._answer = proposals
                self._changed.notify_all()

    def _note_break(self, code: grpc.StatusCode, details: str, *, was_up: bool) -> bool:
        """Logs a break worth a line. Returns whether the draft refused us."""
        refused = not was_up and code in _REFUSALS
        if self._is_stopping:
            return refused
        if refused and details != self._refusal:
            log.error("draft refused the attach address=%s: %s", self._address, details)
        elif was_up:
            log.warning("draft lost address=%s code=%s: %s", self._address, code.name, details)
        else:
            log.debug("draft not reached address=%s code=%s", self._address, code.name)
        if refused:
            with self._changed:
                self._refusal = details or code.name
                self._changed.notify_all()
        return refused
