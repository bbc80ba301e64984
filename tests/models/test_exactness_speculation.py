"""Speculation changes nothing: with any drafter, output is what it is without, greedy or seeded.

The matrix: drafter, shape of its trees, rule of choice, page size, ranks of the target; always 8
reqs at once in chunked prefill, most with sampling parameters of their own. A cover of all pairs
runs on the tiny model and one cell on the built-in one; the rest is marked `full`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from paceline.worker.config import SpecConfig, WorkerConfig
from paceline.worker.draft.proposer import build_proposer
from paceline.worker.link.grpc_link import GrpcLink
from paceline.worker.link.local_link import LocalLink
from paceline.worker.spec.drafter import Drafter
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.spec.vocab import vocab_hash
from paceline.worker.step import SamplingParams
from paceline.worker.target.executor import Executor
from tests.draft_host import draft_config, draft_host_of
from tests.loop_group import PROMPTS, LoopGroup
from tests.matrix import Cell, WriteLine, by_engine, full_matrix, pairs_of, pairwise_cover
from tests.spec_harness import worker_config
from tests.tiny import make_tiny_model
from tests.tp import tp_executor

EOS = 2
SHAPES = {
    "chain": SpecConfig(num_steps=4, topk=1, num_draft_tokens=5),
    "tree2": SpecConfig(num_steps=3, topk=2, num_draft_tokens=8),
    "tree4": SpecConfig(num_steps=3, topk=4, num_draft_tokens=12),
}
RULES = {
    "greedy": SamplingParams(seed=1, max_tokens=24, temperature=0.0),
    "sampled": SamplingParams(seed=40, max_tokens=24, temperature=0.8),
}
# What of a rule each req changes. The sixth wants to end at once and may not.
CHANGES = [
    {},
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"logit_bias": ((7, 2.0), (40, -5.0)), "top_p": 0.8},
    {"min_tokens": 12, "logit_bias": ((EOS, 1000.0),)},
    {"max_tokens": 7},
    {},
]
ENGINE = {"tp": (1, 2), "page": (1, 16)}
USE = {
    "drafter": ("ngram", "local", "grpc"),
    "shape": tuple(SHAPES),
    "rule": tuple(RULES),
}
MATRIX = full_matrix(ENGINE | USE)
COVER = pairwise_cover(ENGINE | USE)
SMALL = [{"tp": 1, "page": 16, "drafter": "grpc", "shape": "tree2", "rule": "sampled"}]
# Prompts of the built-in model: text, chat, code, a text that repeats, other scripts.
SMOLLM2_PROMPTS = (1, 3, 7, 8, 11, 12, 14, 13)
RANK_TIMEOUT_S = 900.0
DRAFT_TIMEOUT_S = 10.0  # the draft shares the cores of a loaded machine with its target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is a fair draft of itself without its second layer."""
    return make_tiny_model(tmp_path_factory.mktemp("faint") / "target", faint_layers=(1,))


@pytest.fixture(scope="module")
def tiny_engine(target: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    yield from build(target, request.param, num_tokens=1024, chunk_size=8)


@pytest.fixture(scope="module")
def engine(smollm2: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    yield from build(smollm2, request.param, num_tokens=2048, chunk_size=32)


def build(model: Path, cell: Cell, *, num_tokens: int, chunk_size: int) -> Iterator[Executor]:
    config = worker_config(
        model,
        spec=SHAPES["tree4"],  # the largest: its rows have room for the others
        page_size=cell["page"],
        num_pages=num_tokens // cell["page"],
        chunked_prefill_size=chunk_size,
        max_num_batched_tokens=8 * chunk_size,
        max_model_len=256,
    )
    with tp_executor(config, cell["tp"], timeout_s=RANK_TIMEOUT_S) as executor:
        yield executor


@dataclass(frozen=True)
class Draft:
    """A draft model; `skip_layers` makes one from the target itself."""

    model: Path
    skip_layers: tuple[int, ...] = ()

    def config(self, spec: SpecConfig) -> WorkerConfig:
        return draft_config(
            self.model, spec, num_pages=512, max_model_len=256, skip_layers=self.skip_layers
        )


@contextmanager
def drafter_of(kind: str, spec: SpecConfig, draft: Draft) -> Iterator[Drafter]:
    """Without a fallback: what is proposed comes from the drafter that is named."""
    if kind == "ngram":
        yield NgramDrafter(spec)
        return
    config = draft.config(spec)
    with ExitStack() as stack:
        if kind == "local":
            yield LinkDrafter(LocalLink(build_proposer(config)), spec)
            return
        host = stack.enter_context(draft_host_of(config))
        link = GrpcLink(
            host.address,
            target_group_id="target-0",
            vocab_hash=vocab_hash(draft.model),
            vocab_size=config.model.vocab_size,
            spec=spec,
        )
        stack.callback(link.shutdown)
        assert link.wait_until_up(20)
        yield LinkDrafter(link, spec)


def check_cell(
    model: str,
    executor: Executor,
    cell: Cell,
    draft: Draft,
    prompts: Sequence[list[int]],
    write_line: WriteLine,
) -> None:
    rule = RULES[cell["rule"]]
    params = [
        replace(rule, seed=rule.seed + i, **changes)  # type: ignore[arg-type]  # per field
        for i, changes in enumerate(CHANGES)
    ]
    started_s = time.monotonic()
    plain = LoopGroup(executor)
    expected = plain.generate(prompts, params)
    plain.close()
    method = "ngram" if cell["drafter"] == "ngram" else "standalone"
    spec = replace(SHAPES[cell["shape"]], method=method, draft_timeout_s=DRAFT_TIMEOUT_S)
    with drafter_of(cell["drafter"], spec, draft) as drafter:
        group = LoopGroup(executor, drafter, spec=spec)
        outputs = group.generate(prompts, params)
        group.close()
    mismatches = [
        i for i, (got, want) in enumerate(zip(outputs, expected, strict=True)) if got != want
    ]
    accepted, proposed = group.total("accepted_tokens"), group.total("proposed_tokens")
    write_line(
        f"speculation model={model} "
        + " ".join(f"{name}={value}" for name, value in cell.items())
        + f" reqs={len(prompts)} tokens={sum(map(len, outputs))} accepted={accepted}/{proposed}"
        f" mismatches={len(mismatches)} time_s={time.monotonic() - started_s:.1f}"
    )
    assert outputs == expected, f"reqs {mismatches} differ"
    assert executor.tp_size == cell["tp"]
    assert 0 < accepted < proposed
    assert plain.total("proposed_tokens") == 0
    assert outputs[5][12:] == [EOS]  # min_tokens held it back, and the bias then wins
    assert EOS not in outputs[5][:12]
    assert len(outputs[6]) <= 7


def test_the_cover_brings_every_two_values_together() -> None:
    assert len(MATRIX) == 72
    assert pairs_of(COVER) == pairs_of(MATRIX)
    assert len(COVER) <= 12


@pytest.mark.parametrize(
    ("tiny_engine", "cell"), by_engine(COVER, ENGINE), indirect=["tiny_engine"]
)
def test_a_draft_without_a_layer_of_its_target_changes_no_token(
    target: Path, tiny_engine: Executor, cell: Cell, write_line: WriteLine
) -> None:
    check_cell("tiny", tiny_engine, cell, Draft(target, (1,)), PROMPTS, write_line)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tiny_engine", "cell"),
    by_engine([cell for cell in MATRIX if cell not in COVER], ENGINE),
    indirect=["tiny_engine"],
)
def test_the_rest_of_the_matrix_changes_no_token(
    target: Path, tiny_engine: Executor, cell: Cell, write_line: WriteLine
) -> None:
    check_cell("tiny", tiny_engine, cell, Draft(target, (1,)), PROMPTS, write_line)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "cell"),
    [
        *by_engine(SMALL, ENGINE),
        *(
            pytest.param(*param.values, id=param.id, marks=pytest.mark.full)
            for param in by_engine(COVER, ENGINE)
            if param.values[1] not in SMALL
        ),
    ],
    indirect=["engine"],
)
def test_the_draft_of_the_built_in_model_changes_no_token(
    smollm2_draft: Path,
    smollm2_prompts: list[list[int]],
    engine: Executor,
    cell: Cell,
    write_line: WriteLine,
) -> None:
    prompts = [smollm2_prompts[i] for i in SMOLLM2_PROMPTS]
    check_cell("smollm2", engine, cell, Draft(smollm2_draft), prompts, write_line)
