"""What of a verified run a req keeps."""

from typing import Any

import pytest

from paceline.worker.spec.commit import CommitResult, commit_tokens
from paceline.worker.step import FinishReason, SamplingParams

EOS = 2


def commit(
    new_ids: list[int], *, before: int = 0, prompt_len: int = 5, max_model_len: int = 100, **kw: Any
) -> CommitResult:
    params = SamplingParams(**({"seed": 1, "max_tokens": 20} | kw))
    return commit_tokens(
        new_ids,
        num_output_before=before,
        num_total_before=prompt_len + before,
        params=params,
        eos_token_ids=(EOS,),
        max_model_len=max_model_len,
    )


def test_a_run_without_an_end_is_kept_whole() -> None:
    assert commit([10, 11, 12]) == CommitResult((10, 11, 12), None, None, 2)


def test_a_chunk_before_the_last_commits_nothing() -> None:
    assert commit([]) == CommitResult(())


def test_the_run_ends_at_eos_and_keeps_it() -> None:
    result = commit([10, EOS, 12, 13])
    assert result == CommitResult((10, EOS), FinishReason.STOP, EOS, 2)


def test_a_stop_id_ends_the_run_and_is_reported() -> None:
    result = commit([10, 11, 12], stop_token_ids=(12, 11))
    assert result == CommitResult((10, 11), FinishReason.STOP, 11, 2)


def test_a_bonus_token_that_ends_the_req_is_no_accepted_draft_token() -> None:
    assert commit([10, 11, EOS]).accept_length == 2
    assert commit([EOS]).accept_length == 0


def test_max_tokens_inside_a_run_keeps_exactly_that_many() -> None:
    result = commit([10, 11, 12, 13], before=3, max_tokens=5)
    assert result == CommitResult((10, 11), FinishReason.LENGTH, None, 2)


def test_max_tokens_reached_by_the_last_token_of_a_run_ends_the_req() -> None:
    result = commit([10, 11], before=3, max_tokens=5)
    assert result == CommitResult((10, 11), FinishReason.LENGTH, None, 1)


def test_eos_behind_the_cap_is_a_length_finish() -> None:
    result = commit([10, 11, EOS, 13], max_tokens=2)
    assert result == CommitResult((10, 11), FinishReason.LENGTH, None, 2)


def test_eos_on_the_last_place_of_the_budget_is_a_stop() -> None:
    result = commit([10, EOS, 12], max_tokens=2)
    assert result == CommitResult((10, EOS), FinishReason.STOP, EOS, 2)


def test_the_context_length_caps_prompt_and_output_together() -> None:
    result = commit([10, 11, 12], before=2, prompt_len=5, max_model_len=9)
    assert result == CommitResult((10, 11), FinishReason.LENGTH, None, 2)


def test_ignored_eos_does_not_end_the_req_but_a_stop_id_does() -> None:
    assert commit([EOS, 11], ignore_eos=True) == CommitResult((EOS, 11), None, None, 1)
    stopped = commit([EOS, 11], ignore_eos=True, stop_token_ids=(EOS,))
    assert stopped == CommitResult((EOS,), FinishReason.STOP, EOS, 1)


@pytest.mark.parametrize(("before", "kept"), [(0, 3), (4, 3), (5, 1)])
def test_no_token_ends_the_req_before_min_tokens(before: int, kept: int) -> None:
    result = commit([EOS, 11, 12], before=before, min_tokens=5)
    assert len(result.emitted) == kept
    assert (result.finish_reason is FinishReason.STOP) == (kept == 1)


def test_a_budget_already_spent_emits_nothing() -> None:
    assert commit([10], before=5, max_tokens=5) == CommitResult((), FinishReason.LENGTH, None, 0)


def test_any_split_of_an_output_into_runs_emits_the_same_tokens() -> None:
    output = [10, 11, 12, EOS, 14, 15, 16]
    for max_tokens in range(1, 8):
        whole = commit(output, max_tokens=max_tokens)
        for size in range(1, 5):
            emitted: list[int] = []
            reason = None
            while reason is None:
                run = output[len(emitted) : len(emitted) + size]
                result = commit(run, before=len(emitted), max_tokens=max_tokens)
                emitted += result.emitted
                reason = result.finish_reason
            assert (tuple(emitted), reason) == (whole.emitted, whole.finish_reason)
