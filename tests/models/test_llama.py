"""Logits of tiny random models, with `transformers` as the judge."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.worker.config import CacheConfig, SchedulerConfig, WorkerConfig
from paceline.worker.errors import ConfigError
from paceline.worker.models.registry import load_model_config
from paceline.worker.step import KvMoves, Phase
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.plans import Row, make_rows, plan
from tests.tiny import VOCAB_SIZE, make_tiny_model

NUM_PAGES = {1: 256, 16: 32}
PROMPT = [5, 9, 33, 77, 2, 4, 100, 200, 7, 7, 31, 64, 255, 1, 0, 263, 18, 90, 12, 13]


def config_of(path: Path, page_size: int = 16, **model: Any) -> WorkerConfig:
    # Any: keyword arguments of load_model_config
    return WorkerConfig(
        load_model_config(path, max_model_len=128, **model),
        cache=CacheConfig(page_size=page_size, num_pages=NUM_PAGES[page_size]),
        scheduler=SchedulerConfig(max_num_seqs=6),
        num_threads=1,
    )


def judge(path: Path, ids: Sequence[int]) -> Tensor:
    """[len(ids), vocab] logits of transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def forward(executor: Executor, *rows: Any) -> Tensor:  # Any: ReqStep, as plan() takes
    logits = executor.forward(plan(*rows))
    assert logits is not None
    assert logits.dtype == torch.float32
    return logits


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    tied: bool = True
    extra: tuple[tuple[str, Any], ...] = ()  # Any: fields of LlamaConfig


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "9 over 3": Shape(9, 3),
    "4 over 4, untied": Shape(4, 4, tied=False),
    "6 over 1": Shape(6, 1),
    "biases": Shape(4, 2, tied=False, extra=(("attention_bias", True), ("mlp_bias", True))),
    "llama3 rope": Shape(4, 2, extra=(("rope_scaling", LLAMA3),)),
    "linear rope": Shape(4, 2, extra=(("rope_scaling", {"rope_type": "linear", "factor": 2.0}),)),
    "head dim of its own": Shape(4, 2, extra=(("head_dim", 20),)),
}


def save_random(path: Path, shape: Shape) -> Path:
    """A checkpoint as transformers itself writes it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16 * shape.num_heads,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=128,
        tie_word_embeddings=shape.tied,
        initializer_range=0.2,
        **dict(shape.extra),
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_equal_those_of_transformers(tmp_path: Path, shape: Shape) -> None:
    path = save_random(tmp_path / "model", shape)
    executor = build_executor(config_of(path))
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    got = forward(executor, row.step(PROMPT))
    assert_close(got, judge(path, PROMPT))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_stay_near_fp32(tiny_model: Path, dtype: str) -> None:
    executor = build_executor(config_of(tiny_model, dtype=dtype))
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    got, want = forward(executor, row.step(PROMPT)), judge(tiny_model, PROMPT)
    assert (got - want).norm() / want.norm() < 0.05


@pytest.fixture(scope="module")
def want(tiny_model: Path) -> Callable[[Sequence[int]], Tensor]:
    """Logits of transformers for any ids of the tiny model, the model loaded once."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def logits(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            result: Tensor = model(torch.tensor([list(ids)])).logits[0]
        return result

    return logits


@pytest.fixture(scope="module", params=[1, 16], ids=["page size 1", "page size 16"])
def executor(tiny_model: Path, request: pytest.FixtureRequest) -> Executor:
    return build_executor(config_of(tiny_model, page_size=request.param))


Want = Callable[[Sequence[int]], Tensor]


@pytest.mark.parametrize("chunk", [1, 3, 16, 19])
def test_chunks_compute_what_a_whole_prompt_does(
    executor: Executor, want: Want, chunk: int
) -> None:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    parts = [
        forward(executor, row.step(PROMPT[i : i + chunk])) for i in range(0, len(PROMPT), chunk)
    ]
    assert_close(torch.cat(parts), want(PROMPT))


def test_decoding_computes_what_a_prompt_does(executor: Executor, want: Want) -> None:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    parts = [forward(executor, row.step(PROMPT[:4]))]
    parts += [forward(executor, row.step([token], Phase.DECODE)) for token in PROMPT[4:]]
    assert_close(torch.cat(parts), want(PROMPT))


def test_rows_of_every_kind_in_one_step_do_not_see_each_other(
    executor: Executor, want: Want
) -> None:
    rows = make_rows(5, executor.num_pages, executor.page_size)
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(5)]
    forward(executor, *(row.step(ids[:9]) for row, ids in zip(rows[:3], prompts, strict=False)))
    a, b, c, d, _ = (ids[9:14] for ids in prompts)
    got = forward(
        executor,
        rows[0].step(a[:1], Phase.DECODE),
        rows[1].step(b[:1], Phase.DECODE),
        rows[2].step(c[:3], Phase.VERIFY, parents=(-1, 0, 0)),
        rows[3].step([*prompts[3][:9], *d], num_logits=1),
        rows[4].step(prompts[4][:9], num_logits=0),
    )
    w = [want(ids) for ids in prompts]
    branch = want([*prompts[2][:9], c[0], c[2]])
    assert_close(got, torch.stack([w[0][9], w[1][9], w[2][9], w[2][10], branch[10], w[3][13]]))


def test_each_path_of_a_tree_computes_what_it_would_as_a_chain(
    executor: Executor, want: Want
) -> None:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    forward(executor, row.step(PROMPT))
    ids = [50, 60, 61, 70, 71, 80]
    parents = (-1, 0, 0, 1, 2, 3)
    got = forward(executor, row.step(ids, Phase.VERIFY, parents=parents, commit=0))
    for path in ([0, 1, 3, 5], [0, 2, 4]):
        assert_close(got[path], want(PROMPT + [ids[i] for i in path])[len(PROMPT) :])
    # Grown level by level behind cached nodes, the same tree gives the same.
    first = row.step(ids[:3], Phase.DRAFT, parents=parents[:3], commit=0)
    second = row.step(ids[3:], Phase.DRAFT, parents=parents, num_cached_nodes=3, commit=0)
    assert_close(torch.cat([forward(executor, first), forward(executor, second)]), got)


def test_moved_kv_is_the_accepted_paths_own(executor: Executor, want: Want) -> None:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    forward(executor, row.step(PROMPT))
    ids = [50, 60, 61, 70, 71]
    step = row.step(ids, Phase.VERIFY, parents=(-1, 0, 0, 1, 2), commit=3)
    forward(executor, step)
    slots = executor._runner.req_to_token.host[row.index, len(PROMPT) :]
    executor.move_kv(KvMoves((int(slots[2]), int(slots[4])), (int(slots[1]), int(slots[2]))))
    got = forward(executor, row.step([99], Phase.DECODE))
    assert_close(got, want([*PROMPT, 50, 61, 71, 99])[-1:])


def test_a_step_that_wants_no_logits_gives_none(executor: Executor) -> None:
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    assert forward(executor, row.step(PROMPT, num_logits=0)).shape == (0, VOCAB_SIZE)


def test_an_overwritten_slot_leaves_nothing_behind(executor: Executor, want: Want) -> None:
    pages = list(range(1, executor.num_pages + 1))
    forward(executor, Row(0, pages, executor.page_size).step(PROMPT[::-1]))
    got = forward(executor, Row(1, pages, executor.page_size).step(PROMPT))
    assert_close(got, want(PROMPT))


def test_left_out_layers_close_ranks(tiny_model: Path, tmp_path: Path) -> None:
    executor = build_executor(config_of(tiny_model, skip_layers=(1,)))
    (row,) = make_rows(1, executor.num_pages, executor.page_size)
    got = forward(executor, row.step(PROMPT))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    del model.model.layers[1]
    model.config.num_hidden_layers = 2
    with torch.no_grad():
        want_logits = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    assert_close(got, want_logits)


def test_progress_is_told_stage_by_stage_up_to_the_end(tiny_model: Path) -> None:
    told: list[tuple[str, float]] = []
    build_executor(config_of(tiny_model), lambda stage, done: told.append((stage, done)))
    assert list(dict.fromkeys(stage for stage, _ in told)) == ["connect", "weights", "cache"]
    for stage in ("connect", "weights", "cache"):
        fractions = [done for name, done in told if name == stage]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)


def test_a_tensor_of_another_shape_than_config_says_is_refused(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", num_layers=1)
    config = config_of(path)
    wrong = replace(config, model=replace(config.model, intermediate_size=95))
    with pytest.raises(ConfigError, match=r"gate_proj\.weight.*\[96, 72\].*makes it \[95, 72\]"):
        build_executor(wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernels": "nonesuch"}, "nonesuch"),
        ({"device": "cuda"}, "torch finds no GPU"),
        ({"scheduler": SchedulerConfig(max_num_seqs=0)}, "max_num_seqs is 0"),
    ],
)
def test_a_rank_that_cannot_be_built_says_why(
    tiny_model: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any: fields of WorkerConfig
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        build_executor(replace(config_of(tiny_model), **change))


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_a_gpu_computes_what_a_cpu_does(tiny_model: Path, kernels: str) -> None:
    on_cpu = build_executor(config_of(tiny_model))
    on_gpu = build_executor(replace(config_of(tiny_model), device="cuda", kernels=kernels))
    for executor in (on_cpu, on_gpu):
        assert executor.num_pages == on_cpu.num_pages
    cpu_row, gpu_row = (make_rows(1, on_cpu.num_pages, on_cpu.page_size)[0] for _ in range(2))
    tree = (-1, 0, 0, 2)
    for ids, phase, parents in (
        (PROMPT, Phase.PREFILL, None),
        (PROMPT[:7], Phase.PREFILL, None),
        ([8], Phase.DECODE, None),
        ([50, 60, 61, 70], Phase.VERIFY, tree),
    ):
        want = forward(on_cpu, cpu_row.step(ids, phase, parents=parents))
        got = forward(on_gpu, gpu_row.step(ids, phase, parents=parents))
        torch.testing.assert_close(got.cpu(), want, atol=5e-4, rtol=1e-3)


@pytest.mark.gpu
def test_on_a_gpu_logits_leave_the_head_in_fp32(tiny_model: Path) -> None:
    config = replace(config_of(tiny_model), device="cuda")
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    executor = build_executor(config)
    row = make_rows(1, executor.num_pages, executor.page_size)[0]
    logits = forward(executor, row.step(PROMPT, Phase.PREFILL))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
