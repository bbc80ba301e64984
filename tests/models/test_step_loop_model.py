"""The step loop over a real executor: the tokens of transformers, however they were scheduled."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.worker.config import SpecConfig
from paceline.worker.errors import InternalError
from paceline.worker.spec.drafter import Drafter
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.step import FinishReason
from paceline.worker.target.build import build_executor
from tests.judge import Judge
from tests.loop_group import MAX_TOKENS, PROMPTS, SAMPLED, SHARED, LoopGroup
from tests.spec_harness import worker_config
from tests.tiny import VOCAB_SIZE, make_tiny_model


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """Greedy output of transformers, one prompt at a time."""
    return Judge(tiny_model).outputs(PROMPTS, MAX_TOKENS)


@contextmanager
def loop_group(
    model: Path,
    *,
    page_size: int,
    num_pages: int,
    chunked_prefill_size: int = 8,
    drafter: Drafter | None = None,
    spec: SpecConfig | None = None,
    max_num_seqs: int = 8,
) -> Iterator[LoopGroup]:
    config = worker_config(
        model,
        spec=spec,
        page_size=page_size,
        num_pages=num_pages,
        chunked_prefill_size=chunked_prefill_size,
        max_num_batched_tokens=96,
        max_num_seqs=max_num_seqs,
    )
    executor = build_executor(config)
    group = LoopGroup(executor, drafter)
    yield group
    group.close()
    executor.shutdown()


@pytest.fixture(params=[(1, 0), (1, 8), (16, 0), (16, 8)], ids=lambda p: f"page{p[0]}-chunk{p[1]}")
def group(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[LoopGroup]:
    page_size, chunked_prefill_size = request.param
    with loop_group(
        tiny_model,
        page_size=page_size,
        num_pages=1024 // page_size,
        chunked_prefill_size=chunked_prefill_size,
    ) as group:
        yield group


def test_a_mixed_batch_of_8_gives_the_tokens_of_transformers_on_prefix_miss_and_hit(
    group: LoopGroup, expected: list[list[int]]
) -> None:
    assert group.generate(PROMPTS) == expected
    cached_before = group.total("cached_tokens")
    assert group.generate(PROMPTS) == expected
    assert group.total("cached_tokens") - cached_before >= sum(
        (len(prompt) - 1) // 16 * 16 for prompt in PROMPTS
    )


def test_a_req_alone_gives_the_same_tokens(group: LoopGroup, expected: list[list[int]]) -> None:
    for prompt, output in zip(PROMPTS[3:6], expected[3:6], strict=True):
        assert group.generate([prompt]) == [output]


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 150), (16, 10)])
@pytest.mark.parametrize("topk", [0, 1, 2])
def test_preemption_and_speculation_leave_every_token_as_it_was(
    tiny_model: Path, expected: list[list[int]], page_size: int, num_pages: int, topk: int
) -> None:
    spec = SpecConfig(
        method="ngram" if topk else "none",
        num_steps=4,
        topk=max(topk, 1),
        num_draft_tokens=7 if topk > 1 else 5,
    )
    with loop_group(
        tiny_model,
        page_size=page_size,
        num_pages=num_pages,
        spec=spec,
        drafter=NgramDrafter(spec) if topk else None,
    ) as group:
        assert group.generate(PROMPTS) == expected
        assert group.total("num_preemptions") > 0
        if topk:
            assert group.total("accepted_tokens") > 0
            assert group.total("proposed_tokens") > group.total("accepted_tokens")


def test_seeded_output_does_not_depend_on_speculation_or_batch(tiny_model: Path) -> None:
    spec = SpecConfig(method="ngram", num_steps=4, topk=1, num_draft_tokens=5)
    outputs = []
    for drafter, max_num_seqs in ((None, 8), (None, 1), (NgramDrafter(spec), 8)):
        with loop_group(
            tiny_model,
            page_size=16,
            num_pages=64,
            spec=spec,
            drafter=drafter,
            max_num_seqs=max_num_seqs,
        ) as group:
            outputs.append(group.generate(PROMPTS, SAMPLED))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == len(PROMPTS)


def test_a_finish_is_named_as_transformers_would(
    group: LoopGroup, expected: list[list[int]]
) -> None:
    group.generate(PROMPTS)
    for events, output in zip(group.events.values(), expected, strict=True):
        reason = FinishReason.LENGTH if len(output) == MAX_TOKENS else FinishReason.STOP
        assert events[-1].finish_reason is reason


@pytest.mark.parametrize("topk", [0, 1, 2])
def test_a_req_that_overflows_ends_alone(tmp_path: Path, topk: int) -> None:
    """The activations of one token are infinite: NaN in all that follows it, and only there."""
    model = make_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    expected = Judge(model).outputs(PROMPTS, MAX_TOKENS)
    token = next(t for t in range(3, VOCAB_SIZE) if _num_users(t, expected) == 1)
    sick = next(i for i, output in enumerate(expected) if token in output)
    _spoil_token(model, token)
    spec = SpecConfig(
        method="ngram" if topk else "none",
        num_steps=4,
        topk=max(topk, 1),
        num_draft_tokens=7 if topk > 1 else 5,
    )
    with loop_group(
        model,
        page_size=16,
        num_pages=64,
        spec=spec,
        drafter=NgramDrafter(spec) if topk else None,
    ) as group:
        for _ in range(2):  # the second time on pages that held NaN
            outputs = group.generate([*PROMPTS, [*SHARED, token]])
            assert outputs.pop() == []
            cut = expected[sick].index(token) + 1
            assert outputs[sick] == expected[sick][:cut]
            del outputs[sick]
            assert outputs == [output for i, output in enumerate(expected) if i != sick]
        errors = [events[-1].error for events in group.events.values() if events[-1].error]
        assert len(errors) == 4
        assert all(isinstance(error, InternalError) for error in errors)


def _num_users(token: int, outputs: list[list[int]]) -> int:
    """How many reqs say a token before their end, 99 when a prompt holds it."""
    if any(token in prompt for prompt in PROMPTS):
        return 99
    return sum(token in output[:-1] for output in outputs)


def _spoil_token(model: Path, token: int) -> None:
    path = model / "model.safetensors"
    state = load_file(path)
    state["model.embed_tokens.weight"][token] = float("inf")
    save_file(state, path)
