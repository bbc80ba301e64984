"""A request's way through a front, whatever protocol it came by.

Resolve, wait at the controller for a group, stream from its leader, turn ids into text, account.
Whatever the end (finish, stop string, cancel, deadline, lost leader), the run on the leader is
ended and the controller is told, once.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence

from paceline.cluster.front.answer import Answer, Chunk, Complete
from paceline.cluster.front.channels import ChannelCache
from paceline.cluster.front.controller_client import ControllerClient, ControllerResolver
from paceline.cluster.front.errors import reason_of
from paceline.cluster.front.leader_client import SETTLE_S, LeaderClient, explain
from paceline.cluster.front.leader_stream import LeaderRun
from paceline.cluster.front.live import LiveReq, LiveTable
from paceline.cluster.front.metrics import FrontMetrics
from paceline.cluster.front.requests import (
    FrontLimits,
    GenerationInput,
    ResolvedReq,
    Resolver,
)
from paceline.cluster.front.served_model import ServedModel
from paceline.cluster.front.stops import StopChecker
from paceline.cluster.front.text import TextCodec
from paceline.cluster.scheduling.dispatch import hash_prefix
from paceline.cluster.wire import finish_reason_from_pb
from paceline.protos.v1 import common_pb2, controller_pb2, group_pb2
from paceline.worker.clock import Clock, SystemClock
from paceline.worker.errors import (
    AlreadyExists,
    InternalError,
    InvalidRequest,
    PacelineError,
    Unavailable,
)
from paceline.worker.step import FinishReason

log = logging.getLogger(__name__)

# A leader lost before the first token: nothing was sent, so another group may take over.
_MAX_RESUBMITS = 2
_RESUBMIT_DELAY_S = 0.1  # doubled each time; the controller learns of a loss within it


# Closed, not only dropped, by who stops early: aclosing() takes a generator.
Events = AsyncGenerator[Chunk | Complete, None]


class GenerationCore:
    def __init__(
        self,
        model: ServedModel,
        codec: TextCodec,
        resolve_controller: ControllerResolver,
        *,
        limits: FrontLimits | None = None,
        speculative_method: str = "none",
        simulated_accept_length: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.model = model
        self.codec = codec
        self.limits = limits or FrontLimits()
        self.speculative_method = speculative_method
        self.simulated_accept_length = simulated_accept_length
        self.metrics = FrontMetrics(model.names[0], simulated_accept_length=simulated_accept_length)
        self._clock = clock or SystemClock()
        self.resolver = Resolver(model, codec, self.limits, self._clock)
        self._channels = ChannelCache()
        self._controller = ControllerClient(
            resolve_controller,
            self._channels,
            wait_s=self.limits.controller_wait_s,
            clock=self._clock,
        )
        self._leaders = LeaderClient(self._channels, self._clock)
        self._live = LiveTable(self.limits.max_concurrent_reqs)
        self._releases: dict[str, asyncio.Task[bool]] = {}
        self.is_draining = False

    # What the faces call.

    async def generate(self, asked: GenerationInput) -> Events:
        """Chunks as they come, then one Complete.

        Raises: PacelineError: refused, or ended without an answer. Closing the generator or
            cancelling its task aborts the request.
        """
        live = await self._admit(asked, self._clock.monotonic())
        try:
            while not live.has_ended:
                for event in await self._advance(live):
                    yield event
        except PacelineError as error:
            self._account(live, reason_of(error), is_failure=True)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._account(live, "abort")
            raise
        finally:
            self._close_run(live)
            self._live.remove(live)
            self._start_release(live.req.req_id)

    async def abort(self, req_id: str) -> bool:
        """Ends a request wherever it is. Idempotent; False when no live request had the id."""
        live = self._live.get(req_id)
        if live is not None:
            live.is_aborted = True
            if live.run is not None:
                # The leader ends the run itself, with a receipt; if it does not, we do.
                live.run.abort()
                asyncio.get_running_loop().call_later(SETTLE_S, live.wake)
            else:
                live.wake()
            return True
        return await self._abort_elsewhere(req_id)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises: InvalidRequest: empty, or many times the context."""
        return await self.resolver.encode(
            text, "prompt", add_special_tokens=add_special_tokens, fits_context=False
        )

    async def tokenize_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Raises: InvalidRequest: as `tokenize`, or the model's template refuses it."""
        text = await self.resolver.render_chat(
            messages, add_generation_prompt=add_generation_prompt
        )
        return await self.resolver.encode(
            text, "messages", add_special_tokens=False, fits_context=False
        )

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Raises: InvalidRequest: an id outside the vocabulary, or more than a context of them."""
        limit = self.model.max_model_len
        if len(ids) > limit:
            raise InvalidRequest(
                f"token_ids has {len(ids)} ids, more than the model's context; send at most "
                f"{limit} at once",
                "token_ids",
            )
        self.model.check_ids("token_ids", ids)
        return self.codec.decode(list(ids), skip_special_tokens=skip_special_tokens)

    async def status(self) -> controller_pb2.GetStatusResponse:
        """Raises: Unavailable: the controller does not answer."""
        return await self._controller.status()

    def begin_drain(self) -> None:
        self.is_draining = True

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests, waits for the running; the number aborted at the limit."""
        self.begin_drain()
        if await self._live.wait_idle(timeout_s):
            return 0
        cut_short = self._live.all()
        for live in cut_short:
            live.ended_by = Unavailable(
                f"this front drained for {timeout_s:g} s and stops; send the request again", 1.0
            )
            live.wake()
        await self._live.wait_idle(SETTLE_S)
        log.warning("drain aborted requests num=%d timeout_s=%g", len(cut_short), timeout_s)
        return len(cut_short)

    def req_ids(self) -> tuple[list[str], list[str]]:
        """(running, waiting)."""
        running = [live.req.req_id for live in self._live.all() if live.address]
        waiting = [live.req.req_id for live in self._live.all() if not live.address]
        return running, waiting

    async def close(self) -> None:
        if self._releases:
            await asyncio.wait(self._releases.values(), timeout=SETTLE_S)
        await self._leaders.close()
        await self._channels.close()
        self.codec.close()

    # Admission and release.

    async def _admit(self, asked: GenerationInput, received_s: float) -> LiveReq:
        try:
            self._check_draining()
            self._live.check_room(asked.request_id)  # before any time is spent on it
            req = await self.resolver.resolve(asked)
            live = LiveReq(req, self._new_answer(req), received_s)
            pending = self._releases.get(req.req_id)
            if pending is not None:  # of an earlier request with this id: it must not hit ours
                await asyncio.shield(pending)
            self._check_draining()  # a drain that began meanwhile must not miss it
            self._live.add(live)
        except PacelineError as error:
            self.metrics.reject(reason_of(error))
            raise
        return live

    def _check_draining(self) -> None:
        if self.is_draining:
            raise Unavailable("this front is draining; send the request to another", 1.0)

    def _new_answer(self, req: ResolvedReq) -> Answer:
        return Answer(
            self.codec.detokenizer(skip_special_tokens=req.skip_special_tokens),
            StopChecker(req.stop, include_stop=req.include_stop_str_in_output),
            min_tokens=req.params.min_tokens,
        )

    def _start_release(self, req_id: str) -> None:
        """In a task of its own, so that a cancelled request is released too."""
        task = asyncio.get_running_loop().create_task(self._controller.release(req_id))
        self._releases[req_id] = task
        task.add_done_callback(lambda done: self._forget_release(req_id, done))

    def _forget_release(self, req_id: str, task: asyncio.Task[bool]) -> None:
        if self._releases.get(req_id) is task:
            del self._releases[req_id]
        if not task.cancelled() and task.exception() is not None:
            log.error("release failed req_id=%s", req_id, exc_info=task.exception())

    # Waiting and running.

    async def _advance(self, live: LiveReq) -> Sequence[Chunk | Complete]:
        """What comes next; nothing where it has to begin again."""
        if live.run is None and not await self._begin_run(live):
            return self._end_woken(live)
        assert live.run is not None
        if live.answer.matched_stop is not None:
            live.group_receipt = await self._leaders.settle(live.run)
            return (self._complete(live, FinishReason.STOP),)
        try:
            news = await live.run.read()
        except PacelineError as error:
            if live.is_ending:
                return self._end_woken(live)
            if isinstance(error, Unavailable | AlreadyExists):
                await self._give_up_run(live, error)
                return ()
            raise explain(live, error) from None
        if news is None:
            return self._end_woken(live)
        return self._take(live, live.run, *news)

    async def _begin_run(self, live: LiveReq) -> bool:
        """False when the request was ended before a leader was told of it."""
        if not await self._wait_for_group(live) or live.is_ending:
            return False
        live.run = self._leaders.start(live)
        self.metrics.running.inc()
        return True

    def _close_run(self, live: LiveReq) -> None:
        if live.run is not None:
            live.run.close()
            live.run = None
            self.metrics.running.dec()

    async def _give_up_run(self, live: LiveReq, error: PacelineError) -> None:
        """For one that can be begun again: the leader was lost, or it has not yet forgotten an
        earlier request of this id. Raises: PacelineError: too late, or once too often."""
        log.warning(
            "run failed group=%s req_id=%s num_tokens=%d: %s",
            live.group_id,
            live.req.req_id,
            len(live.answer.output_ids),
            error,
        )
        if live.answer.output_ids or live.num_lost == _MAX_RESUBMITS:
            raise self._final_error(live, error) from None
        self._close_run(live)
        live.address = ""
        await self._controller.release(live.req.req_id)  # else it would answer the same group
        await asyncio.sleep(_RESUBMIT_DELAY_S * 2**live.num_lost)
        live.num_lost += 1

    async def _wait_for_group(self, live: LiveReq) -> bool:
        """False when the request was ended while it waited."""
        req = live.req
        request = controller_pb2.SubmitRequest(
            req_id=req.req_id,
            num_prompt_tokens=len(req.prompt_ids),
            max_tokens=req.params.max_tokens,
            priority=req.priority,
            deadline_unix_s=req.deadline_unix_s,
            prefix_hash=hash_prefix(req.prompt_ids),
        )
        with self.metrics.waiting.track_inprogress():
            place = await self._controller.submit(live, request)
        if place is None:
            return False
        live.group_id, live.address = place.group_id, place.address
        live.queue_s += place.queue_s
        return True

    def _take(
        self, live: LiveReq, run: LeaderRun, token_ids: list[int], end: group_pb2.ReqEnd | None
    ) -> list[Chunk | Complete]:
        """New tokens and the text they make final; at the end, all that was held back."""
        answer = live.answer
        if token_ids:
            self._note_tokens(live)
        chunk = answer.push(token_ids)
        if end is None:
            return [chunk]
        if answer.matched_stop is None:
            chunk = Chunk(chunk.token_ids, chunk.text + answer.finish().text)
        events: list[Chunk | Complete] = [chunk] if chunk.token_ids or chunk.text else []
        live.group_receipt = end.receipt
        reason = finish_reason_from_pb(end.finish_reason)
        if reason is None:
            raise InternalError(
                f"group '{live.group_id}' ended request '{live.req.req_id}' without a finish reason"
            )
        if reason is FinishReason.ABORT and live.ended_by is not None:
            run.wake()  # for `_end_woken` to say why
        else:
            events.append(self._end_of(live, end, reason))
        return events

    def _note_tokens(self, live: LiveReq) -> None:
        now_s = self._clock.monotonic()
        if live.first_token_s is None:
            live.first_token_s = now_s
            self.metrics.time_to_first_token.observe(now_s - live.received_s)
        else:
            self.metrics.note_gap(now_s - live.last_token_s)
        live.last_token_s = now_s

    # Ends.

    def _end_of(self, live: LiveReq, end: group_pb2.ReqEnd, reason: FinishReason) -> Complete:
        if live.answer.matched_stop is not None:
            return self._complete(live, FinishReason.STOP)
        matched = end.matched_token_id if end.HasField("matched_token_id") else None
        return self._complete(live, reason, matched)

    def _end_woken(self, live: LiveReq) -> list[Chunk | Complete]:
        if live.ended_by is not None:
            raise live.ended_by
        rest = live.answer.finish()
        complete = self._complete(live, FinishReason.ABORT)
        return [rest, complete] if rest.text else [complete]

    def _complete(
        self, live: LiveReq, reason: FinishReason, matched_token_id: int | None = None
    ) -> Complete:
        receipt = self._account(live, reason.name.lower())
        return Complete(
            output_ids=tuple(live.answer.output_ids),
            text=live.answer.text,
            finish_reason=reason,
            matched_token_id=matched_token_id,
            matched_stop=live.answer.matched_stop,
            receipt=receipt,
        )

    def _account(
        self, live: LiveReq, reason: str, *, is_failure: bool = False
    ) -> common_pb2.Receipt:
        """The group's share of the receipt and what only a front can tell; counted once."""
        receipt = common_pb2.Receipt()
        receipt.CopyFrom(live.group_receipt)
        receipt.prompt_tokens = len(live.req.prompt_ids)
        receipt.completion_tokens = len(live.answer.output_ids)
        receipt.queue_s = live.queue_s
        first_s = live.first_token_s
        receipt.time_to_first_token_s = 0.0 if first_s is None else first_s - live.received_s
        receipt.total_s = self._clock.monotonic() - live.received_s
        receipt.seed = live.req.params.seed
        receipt.group_id = live.group_id
        receipt.is_simulated = self.simulated_accept_length > 0.0
        if not live.has_ended:
            live.has_ended = True
            self.metrics.end(receipt, reason, is_failure=is_failure)
        return receipt

    def _final_error(self, live: LiveReq, error: PacelineError) -> PacelineError:
        if isinstance(error, AlreadyExists):
            return error
        num_tokens = len(live.answer.output_ids)
        what = (
            f"was lost after {num_tokens} tokens"
            if num_tokens
            else f"was lost before the first token, the last of {live.num_lost + 1} tried"
        )
        return Unavailable(
            f"group '{live.group_id}' of request '{live.req.req_id}' {what} ({error}); send the "
            "request again",
            1.0,
        )

    # Aborts.

    async def _abort_elsewhere(self, req_id: str) -> bool:
        """Another front's request: its group knows it, the controller's queue may."""
        try:
            status = await self.status()
        except Unavailable:
            return False
        leaders = [g.address for g in status.groups if g.role == "target" and g.address]
        # The queue first: a request leaves it for a leader, and never comes back by itself.
        waited = await self._controller.release(req_id, abort=True)
        found = await asyncio.gather(*(self._leaders.abort(address, req_id) for address in leaders))
        return waited or any(found)
