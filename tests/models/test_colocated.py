"""Colocated drafts over several ranks, and the shipped head beside the model it was trained for."""

from dataclasses import replace
from statistics import mean

import pytest

from paceline.cluster.bench.prompts import load_eval_prompts
from paceline.cluster.models import get_model
from paceline.worker.config import SpecConfig, SpecMethod
from paceline.worker.target.build import build_executor
from tests.colocated import GREEDY, SAMPLED, ColocatedTarget, config_of, spec_config
from tests.colocated_models import ColocatedModels, make_colocated_models
from tests.tp import tp_executor

TINY_PROMPTS = [[5, 9, 33, 77, 2, 4, 100], [7 + i for i in range(15)], [30, 31]]
PROMPTS = load_eval_prompts()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("eagle3", 4), ("standalone", 2)])
def test_two_ranks_say_and_accept_what_one_does(
    models: ColocatedModels, method: SpecMethod, topk: int
) -> None:
    found = []
    config = config_of(models.target, spec_config(method, models.drafts[method], topk=topk))
    for tp_size in (1, 2):
        with tp_executor(config, tp_size) as executor:
            target = ColocatedTarget(executor, chunk_size=6)
            reqs = target.make_reqs(TINY_PROMPTS, [GREEDY, SAMPLED, GREEDY])
            target.run(reqs)
        found.append([(req.output_ids, req.accept_lengths) for req in reqs])
    assert found[0] == found[1]
    with tp_executor(config_of(models.target), 1) as executor:
        plain = ColocatedTarget(executor)
        outputs = plain.run(plain.make_reqs(TINY_PROMPTS, [GREEDY, SAMPLED, GREEDY]))
    assert [output for output, _ in found[0]] == outputs


def smollm2_outputs(
    spec: SpecConfig | None, prompts: list[list[int]], max_tokens: int
) -> tuple[list[list[int]], float]:
    """(outputs, accepted drafts of a step)."""
    config = config_of(
        get_model("smollm2-135m"),
        spec,
        page_size=16,
        max_num_seqs=len(prompts),
        max_model_len=max(map(len, prompts)) + max_tokens,
    )
    executor = build_executor(config)
    target = ColocatedTarget(executor)
    params = [replace(GREEDY, max_tokens=max_tokens, ignore_eos=False)] * len(prompts)
    reqs = target.make_reqs(prompts, params)
    outputs = target.run(reqs)
    executor.shutdown()
    lengths = [n for req in reqs for n in req.accept_lengths]
    return outputs, mean(lengths) if lengths else 0.0


def head(num_steps: int, topk: int = 1, num_draft_tokens: int = 0) -> SpecConfig:
    return spec_config(
        "eagle3",
        get_model("smollm2-135m-eagle3"),
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
    )


def test_the_shipped_head_leaves_every_token_and_guesses_well() -> None:
    """One prompt of each kind, 48 tokens: 1.13 is what the head accepts of these without any of
    the machinery (tests/eagle_rig.py); over all prompts it is 1.59."""
    first = {prompt.kind: list(prompt.ids) for prompt in reversed(PROMPTS)}
    prompts = list(first.values())
    want, _ = smollm2_outputs(None, prompts, 48)
    chains, chain_length = smollm2_outputs(head(4), prompts, 48)
    trees, tree_length = smollm2_outputs(head(4, 4, 16), prompts, 48)
    assert chains == want
    assert trees == want
    assert chain_length == pytest.approx(1.13, rel=0.1)
    assert tree_length > chain_length


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_shipped_head_guesses_what_it_did_when_it_was_trained() -> None:
    prompts = [list(prompt.ids) for prompt in PROMPTS]
    _, accept_length = smollm2_outputs(head(4), prompts, 128)
    assert accept_length == pytest.approx(1.59, rel=0.05)
