"""The host values that cross processes in a step: what to compute, and what came of it.

`StepPlan` goes from a group's leader to all its ranks as plain bytes; `StepReply` is the leader's
alone. Neither holds a tensor. `Batch` (worker/batch.py) is the device form of a plan.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NewType, Protocol

import msgspec

ReqId = NewType("ReqId", str)
PageId = NewType("PageId", int)
Epoch = NewType("Epoch", int)


class Phase(IntEnum):
    """Which kernel path a row takes."""

    PREFILL = 0  # many tokens, causal
    DECODE = 1  # one token
    VERIFY = 2  # a target's draft tree or chain
    DRAFT = 3  # a draft's own growth of a tree
    SPECULATE = 4  # a colocated draft grows a tree behind the root, the target verifies it


class FinishReason(IntEnum):
    STOP = 1
    LENGTH = 2
    ABORT = 3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one req are chosen; resolved, so nothing is absent.

    `temperature` 0 is greedy; `top_k` 0 keeps all; `seed` is 64 bits, always set. Stop strings are
    the front's; only token ids end a req here.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class ReqStep:
    """One req's share of a step.

    Slots: token `i` of the row's sequence lives at `req_to_token[req_pool_index, i]`. Before the
    forward, every rank writes the slots of `pages` into the row from page `page_start` on, so
    that the row owns slots for `prefix_len + num_cached_nodes + len(input_ids)` tokens at least.

    Tree: `parents` is None for a causal row. Otherwise it describes every node behind the prefix,
    the `num_cached_nodes` already in the KV cache first, then one per input id: the index of the
    node's parent, which is smaller than its own, or -1 for a child of the prefix itself. Node `i`
    is stored at `prefix_len + i` and has position `prefix_len + depth(i)`, depth 0 under -1. A
    target's VERIFY row begins with its root (`verified_id`, parent -1).

    A SPECULATE row comes without a tree: the ranks grow one of the plan's `shape`. Where steps do
    not overlap, `prefix_len` is exact and `input_ids` is (verified_id,); where they do, it is what
    the host knows to be committed, at most the length on the device, and `input_ids` is ().
    """

    req_pool_index: int
    phase: Phase
    prefix_len: int
    input_ids: tuple[int, ...]
    page_start: int = 0
    pages: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    num_cached_nodes: int = 0
    # Logit rows wanted: -1 all of the row's tokens, 0 none (a chunk before the last), n the last n.
    num_logits: int = -1
    # Of a PREFILL row: the token behind the chunk where the req has it already (a chunk before the
    # last), -1 where this step chooses it. A shifted draft reads it together with the chunk.
    next_id: int = -1


@dataclass(frozen=True, slots=True)
class SpecShape:
    """The trees that the SPECULATE rows of one step grow; with `num_steps` 0 they grow none."""

    num_steps: int  # depth
    topk: int  # branches kept per depth
    num_draft_tokens: int  # nodes with the root, at most


class StepPlan(msgspec.Struct, frozen=True, tag="plan"):
    """One step of a whole group. Rows are ordered DECODE, then VERIFY/DRAFT/SPECULATE, then
    PREFILL; `shape` is that of all its SPECULATE rows."""

    step_id: int
    rows: tuple[ReqStep, ...]
    shape: SpecShape | None = None


class KvMoves(msgspec.Struct, frozen=True, tag="moves"):
    """KV copied from slot to slot in every layer: `tgt[i] = src[i]`, gathered before scattered."""

    src: tuple[int, ...]
    tgt: tuple[int, ...]


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent while idle, so that a follower can tell a quiet leader from a dead one."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ends a follower."""


LeaderMessage = StepPlan | KvMoves | Heartbeat | Shutdown

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LeaderMessage] = msgspec.msgpack.Decoder(LeaderMessage)


def encode_message(message: LeaderMessage) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> LeaderMessage:
    """Raises msgspec.ValidationError: not a message of ours."""
    return _decoder.decode(data)


class LogitsProcessor(Protocol):
    """Rewrites a req's logits before its own parameters do."""

    # Tensors, which this module knows nothing of.
    def __call__(self, logits: Any, nodes: Any) -> Any:
        """All rows of one req in a step, [n, V] fp32, its own to write to -> the same shape.

        nodes: what the rows stand behind, a `NodeRows` of worker/logit_stages.py.
        """
        ...


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the leader's sampler must know of the row at the same index of a plan.

    `prompt_ids` and `output_ids` are the req's own lists, read only, so that nothing is copied
    per step; `output_ids` ends with `verified_id`.
    """

    params: SamplingParams
    prompt_ids: "list[int]"
    output_ids: "list[int]"
    processors: tuple[LogitsProcessor, ...] = ()
    wants_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class RowResult:
    """What came of one row: nothing for a chunk before the last.

    With an `error` no token could be chosen behind `new_ids`, which may be empty. In a row without
    guesses that ends the req, alone; what it wrote into the KV cache is of no use to others.
    """

    new_ids: tuple[int, ...] = ()  # accepted draft tokens, then the bonus token
    accept_length: int = 0  # len(new_ids) - 1 when there are any
    error: str = ""  # why there are no more tokens
    num_proposed: int = 0  # draft tokens that were verified
    logprobs: tuple[float, ...] = ()  # of each new id, where the row wants them
    is_simulated: bool = False  # `new_ids` are made up, for a benchmark (spec/simulation.py)


@dataclass(frozen=True, slots=True)
class StepReply:
    step_id: int
    rows: tuple[RowResult, ...] = field(default_factory=tuple)


class PendingStep(Protocol):
    """A step that the leader has launched."""

    def collect(self) -> StepReply:
        """Waits for what came of it. Once."""
        ...
