"""The step loop over a real executor: the tokens of transformers, however they were scheduled."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.cluster.group.step_loop import NewReq, ReqEvent, StepLoop
from paceline.worker.config import (
    CacheConfig,
    KernelSetName,
    SchedulerConfig,
    SpecConfig,
    WorkerConfig,
)
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.drafter import Drafter
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.step import FinishReason, ReqId, SamplingParams
from paceline.worker.target.build import build_executor

MAX_TOKENS = 24
SHARED = [3 + (i * i) % 250 for i in range(40)]
# Lengths around pages and chunks; three of them begin alike, and one text repeats.
PROMPTS = [
    [70],
    [5 + (i * 11) % 240 for i in range(15)],
    [9 + (i * 7) % 240 for i in range(16)],
    [9 + (i * 5) % 240 for i in range(33)],
    [*SHARED, 100],
    [*SHARED, 101, 102, 103],
    [*SHARED[:32], *([55, 66, 77] * 6)],
    [*([20, 30, 40, 50] * 12)],
]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """Greedy output of transformers, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


class Group:
    def __init__(
        self,
        model_dir: Path,
        *,
        page_size: int,
        num_pages: int,
        chunked_prefill_size: int,
        drafter: Drafter | None = None,
        spec: SpecConfig | None = None,
        max_num_seqs: int = 8,
        kernels: KernelSetName = "reference",
        device: str = "cpu",
    ) -> None:
        model = load_model_config(str(model_dir), max_model_len=128, dtype="float32")
        config = WorkerConfig(
            model,
            cache=CacheConfig(page_size=page_size, num_pages=num_pages),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=96,
                chunked_prefill_size=chunked_prefill_size,
            ),
            spec=spec or SpecConfig(),
            kernels=kernels,
            device=device,
        )
        self.executor = build_executor(config)
        self.loop = StepLoop(
            self.executor,
            drafter,
            cache=config.cache,
            scheduler=config.scheduler,
            spec=config.spec,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            check_invariants=True,
        )
        self.events: dict[str, list[ReqEvent]] = {}
        self._num_rounds = 0

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | None = None
    ) -> list[list[int]]:
        """All prompts at once."""
        params = params or SamplingParams(seed=1, max_tokens=MAX_TOKENS, temperature=0.0)
        self._num_rounds += 1
        streams: list[list[ReqEvent]] = []
        for i, prompt in enumerate(prompts):
            events: list[ReqEvent] = []
            req_id = ReqId(f"{self._num_rounds}-{i}")
            req_params = replace(params, seed=params.seed + i)
            self.loop.submit(NewReq(req_id, prompt, [], req_params), events.append)
            self.events[req_id] = events
            streams.append(events)
        while self.loop.step_once():
            pass
        assert self.loop.healthy
        return [[token for event in events for token in event.new_ids] for events in streams]

    def total(self, field: str) -> int:
        """Sum of a field over all receipts."""
        return sum(getattr(events[-1].receipt, field) for events in self.events.values())

    def close(self) -> None:
        self.loop.stop()
        self.executor.shutdown()
        snapshot = self.loop.snapshot()
        assert snapshot.num_orphaned_pages == 0
        assert snapshot.num_free_pages + snapshot.num_cached_pages == snapshot.num_pages


@pytest.fixture(params=[(1, 0), (1, 8), (16, 0), (16, 8)], ids=lambda p: f"page{p[0]}-chunk{p[1]}")
def group(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    page_size, chunked_prefill_size = request.param
    group = Group(
        tiny_model,
        page_size=page_size,
        num_pages=1024 // page_size,
        chunked_prefill_size=chunked_prefill_size,
    )
    yield group
    group.close()


def test_a_mixed_batch_of_8_gives_the_tokens_of_transformers_on_prefix_miss_and_hit(
    group: Group, expected: list[list[int]]
) -> None:
    assert group.generate(PROMPTS) == expected
    cached_before = group.total("cached_tokens")
    assert group.generate(PROMPTS) == expected
    assert group.total("cached_tokens") - cached_before >= sum(
        (len(prompt) - 1) // 16 * 16 for prompt in PROMPTS
    )


def test_a_req_alone_gives_the_same_tokens(group: Group, expected: list[list[int]]) -> None:
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
    group = Group(
        tiny_model,
        page_size=page_size,
        num_pages=num_pages,
        chunked_prefill_size=8,
        spec=spec,
        drafter=NgramDrafter(spec) if topk else None,
    )
    assert group.generate(PROMPTS) == expected
    assert group.total("num_preemptions") > 0
    if topk:
        assert group.total("accepted_tokens") > 0
        assert group.total("proposed_tokens") > group.total("accepted_tokens")
    group.close()


def test_seeded_output_does_not_depend_on_speculation_or_batch(tiny_model: Path) -> None:
    params = SamplingParams(seed=40, max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9)
    spec = SpecConfig(method="ngram", num_steps=4, topk=1, num_draft_tokens=5)
    outputs = []
    for drafter, max_num_seqs in ((None, 8), (None, 1), (NgramDrafter(spec), 8)):
        group = Group(
            tiny_model,
            page_size=16,
            num_pages=64,
            chunked_prefill_size=8,
            spec=spec,
            drafter=drafter,
            max_num_seqs=max_num_seqs,
        )
        outputs.append(group.generate(PROMPTS, params))
        group.close()
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == len(PROMPTS)


def test_a_finish_is_named_as_transformers_would(group: Group, expected: list[list[int]]) -> None:
    group.generate(PROMPTS)
    for events, output in zip(group.events.values(), expected, strict=True):
        reason = FinishReason.LENGTH if len(output) == MAX_TOKENS else FinishReason.STOP
        assert events[-1].finish_reason is reason
