"""What of a verified run is emitted, and why a req ends. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.worker.step import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The share of a run that the req keeps.

    `emitted` ends with the token that ended the req, if one did. `accept_length` counts the
    draft tokens among them: tokens cut off by a finish were never accepted.
    """

    emitted: tuple[int, ...]
    finish_reason: FinishReason | None = None
    matched_token_id: int | None = None  # the EOS or stop id, with reason STOP only
    accept_length: int = 0


def commit_tokens(
    new_ids: Sequence[int],
    *,
    num_output_before: int,
    num_total_before: int,
    params: SamplingParams,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
) -> CommitResult:
    """Cuts a run where the req ends: at its first stop token or its budget, whichever is earlier.

    A stop token on the last place of the budget is a stop; one behind it was never emitted, so the
    finish is a length. The order holds whatever the length of the run, hence the same tokens come
    out with and without speculation.

    Args:
        new_ids: accepted draft tokens, then the bonus token; empty for a chunk before the last.
        num_output_before: output tokens before the run.
        num_total_before: prompt and output tokens before the run.
        params: `min_tokens` output tokens must stand before a token can end the req.
        eos_token_ids: end the req unless `params.ignore_eos`; `params.stop_token_ids` always do.
        max_model_len: tokens of prompt and output together.
    """
    num_left = min(params.max_tokens - num_output_before, max_model_len - num_total_before)
    stop_ids = ending_token_ids(params, eos_token_ids)
    num_drafts = len(new_ids) - 1
    for i, token_id in enumerate(new_ids[: max(num_left, 0)]):
        # The token on place i is output number num_output_before + i + 1; min_tokens come first.
        if token_id in stop_ids and num_output_before + i >= params.min_tokens:
            emitted = tuple(new_ids[: i + 1])
            return CommitResult(emitted, FinishReason.STOP, token_id, min(i + 1, num_drafts))
    if new_ids and len(new_ids) >= num_left:
        emitted = tuple(new_ids[: max(num_left, 0)])
        return CommitResult(emitted, FinishReason.LENGTH, None, min(len(emitted), num_drafts))
    return CommitResult(tuple(new_ids), accept_length=max(num_drafts, 0))


def ending_token_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The ids that end this req: its own stop ids, and EOS unless ignored."""
    if params.ignore_eos:
        return frozenset(params.stop_token_ids)
    return frozenset(params.stop_token_ids + eos_token_ids)
