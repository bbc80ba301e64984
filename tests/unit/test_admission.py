"""Admission: accepted, queued, or refused at once with a time to come back."""

import pytest

from paceline.cluster.scheduling.admission import Admission, AdmissionLimits, Verdict, admit
from paceline.worker.errors import Overloaded

LIMITS = AdmissionLimits(max_waiting_reqs=4, max_waiting_prompt_tokens=100)


def ask(
    num_prompt_tokens: int,
    num_waiting: int,
    num_tokens: int,
    *,
    has_room: bool = False,
    reqs_per_s: float = 0.0,
) -> Admission:
    return admit(
        num_prompt_tokens,
        num_waiting_reqs=num_waiting,
        num_waiting_prompt_tokens=num_tokens,
        has_room=has_room,
        limits=LIMITS,
        reqs_per_s=reqs_per_s,
    )


def test_with_room_and_nobody_before_it_a_req_is_accepted() -> None:
    assert ask(1000, 0, 0, has_room=True).verdict is Verdict.ACCEPT
    assert ask(10, 1, 5, has_room=True).verdict is Verdict.QUEUE


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_waiting", "num_tokens", "verdict"),
    [
        (10, 3, 90, Verdict.QUEUE),
        (10, 4, 4, Verdict.REFUSE),
        (11, 3, 90, Verdict.REFUSE),
        (1000, 0, 0, Verdict.QUEUE),  # alone it may wait, or it never could
    ],
)
def test_both_bounds_hold_to_the_last_place(
    num_prompt_tokens: int, num_waiting: int, num_tokens: int, verdict: Verdict
) -> None:
    assert ask(num_prompt_tokens, num_waiting, num_tokens).verdict is verdict


def test_a_refusal_names_value_limit_and_a_time_to_come_back() -> None:
    refusal = ask(10, 4, 4, reqs_per_s=1.0)
    assert refusal.retry_after_s == 2.0
    with pytest.raises(Overloaded, match="4 requests wait, the limit is 4") as caught:
        refusal.raise_if_refused()
    assert caught.value.retry_after_s == 2.0
    assert "100" in ask(11, 3, 90).reason
    ask(10, 3, 90).raise_if_refused()


@pytest.mark.parametrize(("reqs_per_s", "retry_after_s"), [(0.0, 1.0), (1e-6, 60.0), (1e6, 0.5)])
def test_the_time_to_come_back_is_bounded(reqs_per_s: float, retry_after_s: float) -> None:
    assert ask(10, 4, 4, reqs_per_s=reqs_per_s).retry_after_s == retry_after_s
