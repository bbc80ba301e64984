"""What goes into and comes out of a group's step loop, and what it remembers of one req. Pure."""

from dataclasses import dataclass

from paceline.worker.errors import InvalidRequest, PacelineError
from paceline.worker.spec.drafter import DraftHealth
from paceline.worker.step import FinishReason, PageId, ReqId, SamplingParams, SamplingRow


@dataclass(frozen=True, slots=True)
class NewReq:
    """A req as submitted. `output_ids` were generated elsewhere; the group goes on after them.

    `params.max_tokens` counts them too, so that a resumed req carries the params it began with.
    """

    req_id: ReqId
    prompt_ids: list[int]
    output_ids: list[int]
    params: SamplingParams
    priority: int = 0  # higher first
    deadline_unix_s: float | None = None

    def check(self, max_model_len: int, vocab_size: int) -> None:
        """Raises InvalidRequest: a group of these limits could never run it.

        vocab_size: 0 leaves the ids unchecked.
        """
        if not self.prompt_ids:
            raise InvalidRequest("prompt has no tokens; give at least one", "prompt_ids")
        if len(self.prompt_ids) >= max_model_len:
            raise InvalidRequest(
                f"prompt has {len(self.prompt_ids)} tokens, prompt and output together may have "
                f"{max_model_len}; shorten the prompt, or raise the model length or the cache size",
                "prompt_ids",
            )
        if self.params.max_tokens < 1:
            raise InvalidRequest(
                f"max_tokens is {self.params.max_tokens}, must be 1 or more", "max_tokens"
            )
        if vocab_size == 0:
            return
        for name, ids in (("prompt_ids", self.prompt_ids), ("output_ids", self.output_ids)):
            for token_id in (min(ids), max(ids)) if ids else ():
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name} has token id {token_id}, must be in 0..{vocab_size - 1}", name
                    )


@dataclass(frozen=True, slots=True)
class ReqReceipt:
    """A group's share of the message Receipt: what it did for the req since its submit here."""

    prompt_tokens: int
    completion_tokens: int  # generated here: resumed output is not counted again
    cached_tokens: int
    proposed_tokens: int
    accepted_tokens: int  # of the proposed, those that were emitted
    num_steps: int  # that emitted tokens
    fallback_steps: int  # decoding steps without a draft although speculation is on
    num_preemptions: int
    seed: int
    time_to_first_token_s: float  # since submit; 0 when there was no token
    total_s: float


@dataclass(frozen=True, slots=True)
class ReqEvent:
    """New tokens of a req, its end, or both. After `finish_reason` or `error` nothing follows."""

    req_id: ReqId
    new_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    matched_token_id: int | None = None  # the EOS or stop id that ended it, if one did
    receipt: ReqReceipt | None = None  # at the end
    error: PacelineError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class LoopSnapshot:
    """The fields of SnapshotResponse."""

    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # that only the prefix cache holds
    num_orphaned_pages: int  # anything but 0 is a defect
    running_req_ids: tuple[ReqId, ...]
    waiting_req_ids: tuple[ReqId, ...]
    step_id: int
    epoch: int
    draft_attached: bool
    draft: DraftHealth | None = None  # of a group that has, or had, a draft


class ReqState:
    """One req in its group: its tokens, how far they are computed, and what it cost so far."""

    __slots__ = (
        "accept_length",
        "accepted_tokens",
        "cached_tokens",
        "deadline_unix_s",
        "fallback_steps",
        "first_token_s",
        "has_ended",
        "is_suspect",
        "keeps_prefix",
        "known_prefix",
        "kv_allocated_len",
        "num_computed_tokens",
        "num_given_output",
        "num_in_flight",
        "num_preemptions",
        "num_steps",
        "num_written_pages",
        "order",
        "output_ids",
        "params",
        "prefill_len",
        "priority",
        "prompt_ids",
        "proposed_tokens",
        "req_id",
        "req_pool_index",
        "sampling",
        "submitted_s",
        "submitted_unix_s",
    )

    def __init__(self, req: NewReq, submitted_s: float, submitted_unix_s: float) -> None:
        self.req_id = req.req_id
        self.prompt_ids = req.prompt_ids
        self.output_ids = list(req.output_ids)
        self.params = req.params
        self.priority = req.priority
        self.deadline_unix_s = req.deadline_unix_s
        self.submitted_s = submitted_s  # monotonic
        self.submitted_unix_s = submitted_unix_s
        # Steps read the two lists through this one object, so nothing is copied per step.
        self.sampling = SamplingRow(self.params, self.prompt_ids, self.output_ids)

        self.order = 0  # of admission
        self.req_pool_index = 0  # row of req_to_token; 0 while waiting
        self.prefill_len = 0  # tokens there were at admission: computed as a prompt
        # Of its prompt, what steps were launched for; of its output, what they brought.
        self.num_computed_tokens = 0
        self.kv_allocated_len = 0  # tokens whose slots its row owns, in whole pages
        self.num_written_pages = 0  # of its pages, how many its row of req_to_token has
        self.num_in_flight = 0  # steps launched and not collected that have a row of it
        self.has_ended = False  # what is in flight of it counts nowhere
        self.keeps_prefix = True  # what it computed is of use to others
        self.accept_length = 0  # of its last verify
        self.is_suspect = False  # its last verify had an error: the next step brings no guesses
        # While it waits: its pages in the cache, and the cache's number of changes then.
        self.known_prefix: tuple[int, tuple[PageId, ...]] = (-1, ())

        self.num_given_output = len(req.output_ids)
        self.cached_tokens = 0
        self.proposed_tokens = 0
        self.accepted_tokens = 0
        self.num_steps = 0
        self.fallback_steps = 0
        self.num_preemptions = 0
        self.first_token_s: float | None = None  # monotonic

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_decoding(self) -> bool:
        """Its whole prompt is computed, or about to be by a step in flight.

        But for such a first token, its last one was emitted and is the only one without KV.
        """
        return self.req_pool_index > 0 and self.num_computed_tokens >= self.prefill_len

    @property
    def kv_committed_len(self) -> int:
        """Tokens whose KV is final, once nothing of the req is in flight."""
        return self.num_computed_tokens

    @property
    def phase_name(self) -> str:
        if self.req_pool_index == 0:
            return "queue"
        return "decode" if self.is_decoding else "prefill"

    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    def ids_between(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens `start` to `end` of prompt and output together."""
        prompt_len = len(self.prompt_ids)
        if end <= prompt_len:
            return tuple(self.prompt_ids[start:end])
        output = self.output_ids[max(start - prompt_len, 0) : end - prompt_len]
        return (*self.prompt_ids[start:prompt_len], *output)

    def receipt(self, now_s: float) -> ReqReceipt:
        first_s = self.submitted_s if self.first_token_s is None else self.first_token_s
        return ReqReceipt(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.output_ids) - self.num_given_output,
            cached_tokens=self.cached_tokens,
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
            num_steps=self.num_steps,
            fallback_steps=self.fallback_steps,
            num_preemptions=self.num_preemptions,
            seed=self.params.seed,
            time_to_first_token_s=first_s - self.submitted_s,
            total_s=now_s - self.submitted_s,
        )
