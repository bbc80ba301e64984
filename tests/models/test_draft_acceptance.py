"""The built-in draft guesses as well as it was trained to: the strongest test of its alignment.

The prompts are ones that neither model was trained on. A draft that sees its tokens one place off,
or draws other noise than its target, accepts far less than this.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.bench.prompts import EvalPrompt, load_eval_prompts
from paceline.cluster.models import get_model
from paceline.worker.config import SpecConfig, WorkerConfig
from paceline.worker.draft.proposer import build_proposer
from paceline.worker.link.local_link import LocalLink
from paceline.worker.spec.link_drafter import LinkDrafter
from tests.spec_harness import GREEDY, SoloTarget, worker_config

PROMPTS = load_eval_prompts()
EOS = 2
# Tokens per step of four drafts, greedy, fp32, 128 tokens: measured when the draft was trained.
TOKENS_PER_STEP = {"chat": 2.35, "code": 2.88, "codechat": 3.43}


def config_of(model: Path) -> WorkerConfig:
    return worker_config(
        model,
        spec=SpecConfig(method="standalone", num_steps=4, num_draft_tokens=5),
        num_pages=64,
        page_size=16,
        max_num_seqs=1,
        max_model_len=512,
    )


@pytest.fixture(scope="module")
def smol() -> Iterator[tuple[SoloTarget, LinkDrafter]]:
    target = SoloTarget(config_of(get_model("smollm2-135m")))
    config = config_of(get_model("smollm2-135m-draft"))
    drafter = LinkDrafter(LocalLink(build_proposer(config)), config.spec)
    yield target, drafter
    drafter.shutdown()
    target.shutdown()


def measure(
    smol: tuple[SoloTarget, LinkDrafter], prompts: Sequence[EvalPrompt], max_tokens: int
) -> dict[str, float]:
    """Mean tokens per step of each kind of prompt."""
    target, drafter = smol
    accept_lengths: dict[str, list[int]] = defaultdict(list)
    params = replace(GREEDY, max_tokens=max_tokens)
    for prompt in prompts:
        req = target.run([list(prompt.ids)], params, drafter, stop_id=EOS)[0]
        accept_lengths[prompt.kind] += req.accept_lengths
    return {kind: 1 + sum(found) / len(found) for kind, found in accept_lengths.items()}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_draft_gains_what_it_did_when_it_was_trained(
    smol: tuple[SoloTarget, LinkDrafter],
) -> None:
    assert measure(smol, PROMPTS, 128) == pytest.approx(TOKENS_PER_STEP, rel=0.05)


def test_the_draft_gains_on_a_prompt_of_each_kind(smol: tuple[SoloTarget, LinkDrafter]) -> None:
    """Three prompts of the above, 40 tokens each; the figures are of this implementation."""
    first = {prompt.kind: prompt for prompt in reversed(PROMPTS)}
    found = measure(smol, list(first.values()), 40)
    assert found == pytest.approx({"chat": 2.0, "code": 2.71, "codechat": 2.11}, rel=0.1)
