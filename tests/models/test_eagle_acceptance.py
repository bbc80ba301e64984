"""The shipped EAGLE-3 head guesses as well as it was trained to: its alignment with its target.

A head that sees tokens or features one place off, or misses a tap, still works and accepts far
less. The figures are its README's: fp32, greedy, chains of four drafts, up to 128 tokens.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

import pytest

from paceline.cluster.bench.prompts import EvalPrompt, load_eval_prompts
from paceline.cluster.models import get_model
from tests.eagle_rig import (
    FULL,
    HeadRunner,
    accept_lengths,
    build_head_runner,
    build_target,
    decode_greedily,
)

PROMPTS = load_eval_prompts()
EOS = 2
NUM_STEPS = 4
ACCEPT_LENGTH = {"chat": 1.28, "code": 1.84, "codechat": 1.94, "all": 1.59}


@pytest.fixture(scope="module")
def head() -> Iterator[HeadRunner]:
    executor = build_target(get_model("smollm2-135m"))
    yield build_head_runner(executor, get_model("smollm2-135m-eagle3"))
    executor.shutdown()


def measure(head: HeadRunner, prompts: Sequence[EvalPrompt], max_tokens: int) -> dict[str, float]:
    """Mean accepted drafts of a step, of each kind of prompt and of all."""
    found: dict[str, list[int]] = defaultdict(list)
    for prompt in prompts:
        truth = decode_greedily(
            head.target, head.config.capture(FULL), list(prompt.ids), max_tokens + NUM_STEPS, EOS
        )
        lengths = accept_lengths(head, truth, NUM_STEPS, max_tokens)
        found[prompt.kind] += lengths
        found["all"] += lengths
    return {kind: mean(lengths) for kind, lengths in found.items()}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_head_guesses_what_it_did_when_it_was_trained(head: HeadRunner) -> None:
    found = measure(head, PROMPTS, 128)
    assert found == pytest.approx(ACCEPT_LENGTH, rel=0.05)


def test_the_head_guesses_well_from_its_own_places_and_badly_one_off(head: HeadRunner) -> None:
    """Two prompts of the above, 40 tokens each; the figures are of this implementation."""
    first = {prompt.kind: list(prompt.ids) for prompt in reversed(PROMPTS)}
    capture = head.config.capture(FULL)
    for kind, accept_length in (("chat", 0.95), ("code", 1.56)):
        truth = decode_greedily(head.target, capture, first[kind], 40 + NUM_STEPS, EOS)
        one_off = replace(truth, features=truth.features.roll(1, 0))
        right, wrong = (mean(accept_lengths(head, t, NUM_STEPS, 40)) for t in (truth, one_off))
        assert right == pytest.approx(accept_length, rel=0.2)
        assert wrong < 0.6 * right
