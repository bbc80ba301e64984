"""The tokens chosen for a row, the last of which may be missing → its RowResult."""

from collections.abc import Sequence

from paceline.worker.dense_sampler import NO_TOKEN
from paceline.worker.step import RowResult

_NOT_FINITE = (
    "its logits have no finite maximum: the model's weights or activations overflow or hold NaN "
    "there; bfloat16 and float32 hold greater values than float16"
)


def row_result(
    new_ids: Sequence[int],
    logprobs: Sequence[float] = (),
    *,
    num_proposed: int = 0,
    is_simulated: bool = False,
) -> RowResult:
    """Of at least one token, of which the last may be NO_TOKEN, and their log-probabilities."""
    is_lost = new_ids[-1] == NO_TOKEN
    kept = len(new_ids) - is_lost
    return RowResult(
        tuple(new_ids[:kept]),
        max(kept - 1, 0),
        _NOT_FINITE if is_lost else "",
        num_proposed,
        tuple(logprobs[:kept]),
        is_simulated,
    )
