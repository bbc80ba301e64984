"""N-gram guesses in a group that serves: none where there is nothing to go by, accepted where text
repeats itself or a corpus has it, and the tokens of plain decoding throughout."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.group.corpus import load_corpus
from paceline.worker.config import SpecConfig
from paceline.worker.spec.drafter import DraftContext
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.spec.ngram_corpus import Corpus
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import SamplingParams
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.loop_group import GREEDY, PROMPTS, SAMPLED, LoopGroup
from tests.spec_harness import worker_config

CHAIN = SpecConfig("ngram", num_steps=4, topk=1, num_draft_tokens=5)
TREE = SpecConfig("ngram", num_steps=3, topk=2, num_draft_tokens=8)
SPECS = pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
REPEATING = [[20, 30, 40, 50] * 12, [7, *([55, 66, 77] * 9)]]


@pytest.fixture(scope="module")
def executor(tiny_model: Path) -> Iterator[Executor]:
    config = worker_config(tiny_model, spec=TREE, page_size=16, num_pages=64)
    executor = build_executor(replace(config, num_threads=1))
    yield executor
    executor.shutdown()


def plain_outputs(
    executor: Executor, prompts: Sequence[list[int]], params: SamplingParams
) -> list[list[int]]:
    group = LoopGroup(executor, spec=SpecConfig())
    outputs = group.generate(prompts, params)
    group.close()
    return outputs


def corpus_file(tmp_path: Path, texts: Sequence[list[int]]) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"input_ids": text}) for text in texts))
    return path


class Recorder(NgramDrafter):
    """Keeps what was proposed."""

    def __init__(self, spec: SpecConfig, corpus: Corpus | None = None) -> None:
        super().__init__(spec, corpus=corpus)
        self.trees: list[DraftTree] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        trees = super().propose(contexts)
        self.trees += [tree for tree in trees if tree is not None]
        return trees


@SPECS
@pytest.mark.parametrize("corpus", [None, Corpus([[200, 201, 202, 203, 204]])], ids=["", "corpus"])
def test_a_context_never_seen_takes_one_step_per_token_without_a_draft(
    executor: Executor, spec: SpecConfig, corpus: Corpus | None
) -> None:
    prompt = [11, 13, 17, 19, 23]
    params = SamplingParams(seed=4, max_tokens=8, temperature=5.0, ignore_eos=True)
    (plain,) = plain_outputs(executor, [prompt], params)
    assert len({*prompt, *plain}) == len(prompt) + len(plain), "a token that comes twice is seen"
    group = LoopGroup(executor, NgramDrafter(spec, corpus=corpus), spec=spec)
    assert group.generate([prompt], params) == [plain]
    (receipt,) = group.receipts()
    group.close()
    assert (receipt.proposed_tokens, receipt.accepted_tokens) == (0, 0)
    assert receipt.num_steps == len(plain)
    assert (
        receipt.fallback_steps == len(plain) - 2
    )  # the first is the prompt's, the last has no room


@SPECS
def test_no_token_is_verified_that_was_not_guessed(executor: Executor, spec: SpecConfig) -> None:
    drafter = Recorder(spec)
    group = LoopGroup(executor, drafter, spec=spec)
    outputs = group.generate(PROMPTS)
    group.close()
    assert outputs == plain_outputs(executor, PROMPTS, GREEDY)
    guessed = sum(len(tree.token_ids) for tree in drafter.trees)
    assert 0 < group.total("proposed_tokens") == guessed
    assert any(tree.num_nodes < spec.num_draft_tokens for tree in drafter.trees)


@SPECS
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_that_repeats_itself_is_accepted_and_changes_no_token(
    executor: Executor, spec: SpecConfig, params: SamplingParams
) -> None:
    plain = plain_outputs(executor, REPEATING, params)
    group = LoopGroup(executor, NgramDrafter(spec), spec=spec)
    assert group.generate(REPEATING, params) == plain
    assert all(receipt.proposed_tokens for receipt in group.receipts())
    assert group.total("accepted_tokens") > 0
    group.close()


@SPECS
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_corpus_that_has_the_answer_saves_steps_from_the_first_req_on(
    executor: Executor, tmp_path: Path, spec: SpecConfig, params: SamplingParams
) -> None:
    plain = plain_outputs(executor, PROMPTS, params)
    file = corpus_file(tmp_path, [p + out for p, out in zip(PROMPTS, plain, strict=True)])
    corpus = load_corpus(replace(spec, ngram_corpus=str(file)), executor.config.model)
    with_corpus = LoopGroup(executor, NgramDrafter(spec, corpus=corpus), spec=spec)
    assert with_corpus.generate(PROMPTS, params) == plain
    with_corpus.close()
    without = LoopGroup(executor, NgramDrafter(spec), spec=spec)
    assert without.generate(PROMPTS, params) == plain
    without.close()
    assert with_corpus.total("num_steps") < without.total("num_steps")
    if spec is CHAIN:  # from three tokens on a prompt is known, and its answer comes in full steps
        for receipt, output in list(zip(with_corpus.receipts(), plain, strict=True))[1:]:
            assert receipt.num_steps <= 2 + (len(output) - 1) // (spec.num_steps + 1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_corpus_that_misleads_changes_no_token(
    executor: Executor, tmp_path: Path, params: SamplingParams
) -> None:
    plain = plain_outputs(executor, PROMPTS, params)
    texts = [p + [(t + 1) % 250 for t in out] for p, out in zip(PROMPTS, plain, strict=True)]
    file = corpus_file(tmp_path, texts)
    corpus = load_corpus(replace(TREE, ngram_corpus=str(file)), executor.config.model)
    drafter = Recorder(TREE, corpus)
    group = LoopGroup(executor, drafter, spec=TREE)
    assert group.generate(PROMPTS, params) == plain
    assert group.total("proposed_tokens") > group.total("accepted_tokens")
    group.close()
