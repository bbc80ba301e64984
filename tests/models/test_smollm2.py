"""The built-in model, with `transformers` as the judge."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.worker.config import CacheConfig, SchedulerConfig, WorkerConfig
from paceline.worker.models.registry import load_model_config
from paceline.worker.step import Phase, SamplingParams, SamplingRow
from paceline.worker.target.executor import Executor
from tests.plans import make_rows, plan
from tests.tp import tp_executor

PROMPTS = (
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
)
NUM_TOKENS = 32
GREEDY = SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [tokenizer(text)["input_ids"] for text in PROMPTS]


@pytest.fixture(scope="module")
def want(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    outputs = []
    for ids in prompts:
        output = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        outputs.append(output[0, len(ids) :].tolist())
    return outputs


def generate(executor: Executor, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts as one batch."""
    rows = make_rows(len(prompts), executor.num_pages, executor.page_size)
    outputs: list[list[int]] = [[] for _ in prompts]
    sampling = [
        SamplingRow(GREEDY, ids, output) for ids, output in zip(prompts, outputs, strict=True)
    ]
    steps = [row.step(ids, num_logits=1) for row, ids in zip(rows, prompts, strict=True)]
    for _ in range(NUM_TOKENS):
        reply = executor.execute(plan(*steps), sampling)
        for output, result in zip(outputs, reply.rows, strict=True):
            output += result.new_ids
        steps = [
            row.step(output[-1:], Phase.DECODE) for row, output in zip(rows, outputs, strict=True)
        ]
    return outputs


@pytest.mark.parametrize("tp_size", [1, 2])
def test_greedy_tokens_equal_those_of_transformers(
    smollm2: Path, prompts: list[list[int]], want: list[list[int]], tp_size: int
) -> None:
    config = WorkerConfig(
        load_model_config(smollm2, max_model_len=256, dtype="float32"),
        cache=CacheConfig(num_pages=64),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    with tp_executor(config, tp_size) as executor:
        assert generate(executor, prompts) == want
