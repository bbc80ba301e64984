"""What a row's result does to its req: tokens, counters, the event that tells of it. Pure.

It knows no rows, pages or steps in flight: `ReqTable` decides whose results still count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.group.req_state import ReqEvent, ReqState
from paceline.worker.errors import InternalError
from paceline.worker.spec.commit import CommitResult, commit_tokens
from paceline.worker.step import Phase, ReqStep, RowResult


@dataclass(frozen=True, slots=True)
class ResultRules:
    """What ends a req, and what counts as a step without a draft."""

    max_model_len: int
    eos_token_ids: tuple[int, ...]
    is_speculating: bool

    def num_tokens_left(self, req: ReqState) -> int:
        by_limit = req.params.max_tokens - len(req.output_ids)
        return min(by_limit, self.max_model_len - req.num_tokens)

    def end_of_given(self, req: ReqState, now_s: float) -> ReqEvent | None:
        """The last event of a req that was resumed after its last token; None for all others."""
        if not req.output_ids:
            return None
        done = self._cut(req, req.output_ids[-1:], num_taken_back=1)
        return None if done.finish_reason is None else _last_event(req, (), done, now_s)

    def commit(
        self, req: ReqState, step: ReqStep, result: RowResult, now_s: float
    ) -> ReqEvent | None:
        """Appends what the req keeps of a row that chose tokens; None where there is no news.

        A result with an error ends its req, and the others do not notice. Behind guesses the row
        is first tried without any: a wrong guess may be what the model cannot compute.

        Raises InternalError: the row chose nothing.
        """
        if not result.new_ids and not result.error:
            raise InternalError(f"a step chose no token for request '{req.req_id}'")
        had_tokens_left = self.num_tokens_left(req) > 1
        done = self._cut(req, result.new_ids)
        req.output_ids.extend(done.emitted)
        req.num_computed_tokens = max(req.num_tokens - 1, req.prefill_len)
        if done.emitted:
            req.num_steps += 1
            if req.first_token_s is None:
                req.first_token_s = now_s
        self._count(req, step, result, done, had_tokens_left=had_tokens_left)
        if done.finish_reason is not None:  # as without a draft, whatever lies behind it
            return _last_event(req, done.emitted, done, now_s)
        req.is_suspect = bool(result.error)
        if result.error and step.phase not in (Phase.VERIFY, Phase.SPECULATE):
            error = InternalError(
                f"request '{req.req_id}' ended after {len(req.output_ids)} tokens: {result.error}"
            )
            return ReqEvent(req.req_id, done.emitted, receipt=req.receipt(now_s), error=error)
        return ReqEvent(req.req_id, done.emitted) if done.emitted else None

    def _count(
        self,
        req: ReqState,
        step: ReqStep,
        result: RowResult,
        done: CommitResult,
        *,
        had_tokens_left: bool,
    ) -> None:
        """Of drafts only what was emitted counts as accepted."""
        if step.phase is Phase.PREFILL:
            return
        num_proposed = result.num_proposed
        if step.phase is Phase.VERIFY:
            num_proposed = len(step.input_ids) - 1
        req.proposed_tokens += num_proposed
        req.accepted_tokens += done.accept_length
        req.accept_length = result.accept_length
        if num_proposed == 0 and self.is_speculating and had_tokens_left:
            req.fallback_steps += 1

    def _cut(
        self, req: ReqState, new_ids: Sequence[int], *, num_taken_back: int = 0
    ) -> CommitResult:
        """Judges `new_ids` behind the req's tokens without the last `num_taken_back`."""
        return commit_tokens(
            new_ids,
            num_output_before=len(req.output_ids) - num_taken_back,
            num_total_before=req.num_tokens - num_taken_back,
            params=req.params,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )


def _last_event(
    req: ReqState, new_ids: tuple[int, ...], done: CommitResult, now_s: float
) -> ReqEvent:
    return ReqEvent(
        req.req_id, new_ids, done.finish_reason, done.matched_token_id, req.receipt(now_s)
    )
