"""Greedy output is that of transformers, token for token, however a group computes it.

The matrix: ranks, page size, chunked prefill, reqs at once, prefix cache. A cover of all pairs
runs on the tiny model and three cells on the built-in one; all cells of that one, with 16 prompts
of 64 tokens, are marked `full`. Each cell writes a line.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from paceline.worker.step import SamplingParams
from paceline.worker.target.executor import Executor
from tests.judge import Judge
from tests.loop_group import MAX_TOKENS, PROMPTS, LoopGroup
from tests.matrix import Cell, WriteLine, by_engine, full_matrix, pairs_of, pairwise_cover
from tests.spec_harness import worker_config
from tests.tp import tp_executor

# What a group is built with, and how it is then used. Two ranks share 9 query heads over 3 KV
# heads unevenly: 6 over 2 and 3 over 1.
ENGINE = {"tp": (1, 2), "page": (1, 16), "prefill": ("whole", "chunked")}
USE = {"batch": (1, 8), "prefix": ("miss", "hit")}
MATRIX = full_matrix(ENGINE | USE)
COVER = pairwise_cover(ENGINE | USE)
SMALL = [
    {"tp": 1, "page": 16, "prefill": "chunked", "batch": 8, "prefix": "hit"},
    {"tp": 2, "page": 1, "prefill": "chunked", "batch": 8, "prefix": "miss"},
    {"tp": 2, "page": 16, "prefill": "whole", "batch": 1, "prefix": "hit"},
]
SMALL_PROMPTS = (0, 5, 6, 7, 8, 9, 11, 13)
SMALL_TOKENS = 12
FULL_TOKENS = 64
# Of the judge's choices; the sums of two orders of computing differ by some 1e-5.
MIN_GAP = 1e-4
# Two ranks wait for each other while the judge computes or another cell runs.
RANK_TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def tiny_judge(tiny_model: Path) -> Judge:
    return Judge(tiny_model)


@pytest.fixture(scope="module")
def judge(smollm2: Path) -> Judge:
    return Judge(smollm2)


@pytest.fixture(scope="module")
def tiny_engine(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    yield from build(tiny_model, request.param, num_tokens=1024, chunk_size=8, max_model_len=128)


@pytest.fixture(scope="module")
def engine(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    yield from build(smollm2, request.param, num_tokens=3072, chunk_size=32, max_model_len=256)


def build(
    model: Path, cell: Cell, *, num_tokens: int, chunk_size: int, max_model_len: int
) -> Iterator[Executor]:
    config = worker_config(
        model,
        page_size=cell["page"],
        num_pages=num_tokens // cell["page"],
        chunked_prefill_size=chunk_size if cell["prefill"] == "chunked" else 0,
        # With chunks, a step has room for a few of them: prefills meet decodes.
        max_num_batched_tokens=4 * chunk_size if cell["prefill"] == "chunked" else 1024,
        max_model_len=max_model_len,
    )
    with tp_executor(config, cell["tp"], timeout_s=RANK_TIMEOUT_S) as executor:
        yield executor


def run_cell(
    executor: Executor, cell: Cell, prompts: Sequence[list[int]], max_tokens: int
) -> list[list[int]]:
    """The output of every prompt, `cell["batch"]` at once; checks what the prefix cache gave."""
    params = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
    if cell["prefix"] == "hit":
        group = LoopGroup(executor, max_num_seqs=cell["batch"])
        group.generate(prompts, SamplingParams(seed=0, max_tokens=1, temperature=0.0))
        outputs = [
            output
            for batch in batches(prompts, cell["batch"])
            for output in generate(group, batch, params, is_hit=True)
        ]
        group.close()
        return outputs
    outputs = []
    for batch in batches(prompts, cell["batch"]):
        group = LoopGroup(executor, max_num_seqs=cell["batch"])
        outputs += generate(group, batch, params, is_hit=False)
        group.close()
    return outputs


def batches(prompts: Sequence[list[int]], batch_size: int) -> list[Sequence[list[int]]]:
    """One by one; or all, of which the loop runs `batch_size` at once."""
    return [[prompt] for prompt in prompts] if batch_size == 1 else [prompts]


def generate(
    group: LoopGroup, prompts: Sequence[list[int]], params: SamplingParams, *, is_hit: bool
) -> list[list[int]]:
    outputs = group.generate(prompts, params)
    cached = [receipt.cached_tokens for receipt in group.receipts()]
    for i, prompt in enumerate(prompts):
        if is_hit:  # all whole pages; the last token is computed for its logits
            assert cached[i] >= (len(prompt) - 1) // group.page_size * group.page_size
        else:  # nothing but what another req of the batch happens to say too
            others = [prompts[j] + outputs[j] for j in range(len(prompts)) if j != i]
            assert cached[i] <= max((num_shared(prompt, other) for other in others), default=0)
    return outputs


def num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def check_cell(
    model: str,
    executor: Executor,
    cell: Cell,
    judge: Judge,
    prompts: Sequence[list[int]],
    max_tokens: int,
    write_line: WriteLine,
) -> None:
    started_s = time.monotonic()
    outputs = run_cell(executor, cell, prompts, max_tokens)
    elapsed_s = time.monotonic() - started_s
    differences = judge.differences(prompts, outputs, max_tokens)
    write_line(
        f"exactness model={model} "
        + " ".join(f"{name}={value}" for name, value in cell.items())
        + f" reqs={len(prompts)} tokens={sum(map(len, outputs))} mismatches={len(differences)}"
        f" time_s={elapsed_s:.1f}"
    )
    assert executor.tp_size == cell["tp"]
    assert not differences, "\n".join(differences)


def test_the_cover_brings_every_two_values_together() -> None:
    assert len(MATRIX) == 32
    assert pairs_of(COVER) == pairs_of(MATRIX)
    assert len(pairs_of(MATRIX)) == 10 * 4
    assert len(COVER) <= 8


@pytest.mark.parametrize(
    ("tiny_engine", "cell"), by_engine(COVER, ENGINE), indirect=["tiny_engine"]
)
def test_a_tiny_model_says_what_transformers_says(
    tiny_judge: Judge, tiny_engine: Executor, cell: Cell, write_line: WriteLine
) -> None:
    check_cell("tiny", tiny_engine, cell, tiny_judge, PROMPTS, MAX_TOKENS, write_line)


@pytest.mark.parametrize(("engine", "cell"), by_engine(SMALL, ENGINE), indirect=["engine"])
def test_smollm2_says_what_transformers_says(
    smollm2_prompts: list[list[int]],
    judge: Judge,
    engine: Executor,
    cell: Cell,
    write_line: WriteLine,
) -> None:
    some = [smollm2_prompts[i] for i in SMALL_PROMPTS]
    check_cell("smollm2", engine, cell, judge, some, SMALL_TOKENS, write_line)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_no_choice_of_the_judge_is_a_tie(
    smollm2_prompts: list[list[int]], judge: Judge, write_line: WriteLine
) -> None:
    """Where two tokens are as good as equal, the order of a sum decides and neither is wrong."""
    outputs = judge.outputs(smollm2_prompts, FULL_TOKENS)
    gap = judge.smallest_gap(smollm2_prompts, FULL_TOKENS)
    num_long = sum(len(output) == FULL_TOKENS for output in outputs)
    write_line(
        f"reference model=smollm2 prompts={len(smollm2_prompts)} tokens={sum(map(len, outputs))}"
        f" of_64={num_long} smallest_gap={gap:.5f}"
    )
    assert len(smollm2_prompts) == 16
    assert num_long >= 14  # the others end by themselves, which must be found too
    assert gap > MIN_GAP


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("engine", "cell"), by_engine(MATRIX, ENGINE), indirect=["engine"])
def test_the_whole_matrix_says_what_transformers_says(
    smollm2_prompts: list[list[int]],
    judge: Judge,
    engine: Executor,
    cell: Cell,
    write_line: WriteLine,
) -> None:
    check_cell("smollm2", engine, cell, judge, smollm2_prompts, FULL_TOKENS, write_line)
