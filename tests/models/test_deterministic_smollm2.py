"""The built-in model in bf16, deterministic: no token flips, whatever drafts or is beside it."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.bench.engines import LoopEngine
from paceline.cluster.bench.flips import count_flips, flip_prompts
from paceline.cluster.models import get_model
from paceline.worker.config import SpecConfig
from tests.matrix import WriteLine

PER_BATCH = 16
RULES = {"greedy": 0.0, "seeded": 0.8}
WAYS = {
    "ngram": SpecConfig(method="ngram", num_steps=3, topk=2, num_draft_tokens=8),
    "eagle3-chain": SpecConfig(
        method="eagle3", placement="colocated", num_steps=3, topk=1, num_draft_tokens=4,
        overlap="off",
    ),
    "eagle3-tree-overlapped": SpecConfig(
        method="eagle3", placement="colocated", num_steps=3, topk=4, num_draft_tokens=12,
        overlap="on",
    ),
}  # fmt: skip


def open_engine(model: Path, spec: SpecConfig | None) -> LoopEngine:
    return LoopEngine(model, dtype="bfloat16", max_model_len=512, spec=spec, deterministic=True)


def outputs(
    engine: LoopEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rule: str,
    bs: int = PER_BATCH,
) -> list[list[int]]:
    found: list[list[int]] = []
    for start in range(0, len(prompts), bs):
        batch = prompts[start : start + bs]
        found += engine.run(batch, max_tokens, RULES[rule], first_seed=start).output_ids
    return found


def check(
    model: Path, num_prompts: int, num_alone: int, max_tokens: int, write_line: WriteLine
) -> None:
    """`num_alone` of the prompts are also decoded one by one."""
    prompts = flip_prompts(num_prompts)
    with closing(open_engine(model, None)) as engine:
        plain = {rule: outputs(engine, prompts, max_tokens, rule) for rule in RULES}
        for rule in RULES:
            alone = outputs(engine, prompts[:num_alone], max_tokens, rule, 1)
            assert alone == plain[rule][:num_alone]
    for way, spec in WAYS.items():
        if spec.is_colocated:
            spec = replace(spec, draft_model=str(get_model("smollm2-135m-eagle3")))
        with closing(open_engine(model, spec)) as engine:
            for rule in RULES:
                flips = count_flips(plain[rule], outputs(engine, prompts, max_tokens, rule))
                write_line(f"deterministic model=smollm2 way={way} rule={rule} flips={flips}")
                assert flips.num_flips == 0
                assert flips.num_positions == num_prompts * max_tokens


@pytest.mark.timeout(300)
def test_no_token_of_a_few_prompts_flips(smollm2: Path, write_line: WriteLine) -> None:
    check(smollm2, 3, 1, 12, write_line)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_token_of_64_prompts_flips(smollm2: Path, write_line: WriteLine) -> None:
    check(smollm2, 64, 8, 128, write_line)
