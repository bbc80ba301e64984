"""`bench spec`: what speculation with a colocated head gains on this machine.

Every figure is a ratio of two engines in one process, which answer the same prompts in turn until
their own ends. The weights, the kernels and the thread are the same; only drafting differs.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from paceline.cluster.bench.engines import LoopEngine, RunResult
from paceline.cluster.bench.harness import (
    MIN_BLOCKS,
    Figure,
    Goal,
    figure_of_blocks,
    measure_ratio,
    print_table,
    write_results,
)
from paceline.cluster.bench.prompts import load_eval_prompts
from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError

MAX_TOKENS = 128
MAX_MODEL_LEN = 512
BATCH_SIZE = 8
DETERMINISTIC_TOKENS = 48

MIXED_GOAL = Goal(1.4, aim=1.8)
CODE_GOAL = Goal(1.7, aim=2.2)
MIXED_BATCH_GOAL = Goal(1.0)
CODE_BATCH_GOAL = Goal(1.1)
OVERLAP_GOAL = Goal(0.97)
HOST_GOAL = Goal(1.0, higher_is_better=False)

Progress = Callable[[str], None]


class PromptRounds:
    """Prompts of one choice, a few more of them at each call, round and round.

    Both sides of a ratio must ask alike, so each side has its own.
    """

    def __init__(self, *, code_only: bool) -> None:
        chosen = [prompt for prompt in load_eval_prompts() if prompt.is_code or not code_only]
        # Kinds in turn, so that a block holds some of each.
        by_kind = [
            [p.ids for p in chosen if p.kind == kind] for kind in {p.kind: 0 for p in chosen}
        ]
        longest = max(map(len, by_kind))
        self._prompts = [ids[i % len(ids)] for i in range(longest) for ids in by_kind]
        self._next = 0

    def take(self, count: int) -> list[tuple[int, ...]]:
        taken = [self._prompts[(self._next + i) % len(self._prompts)] for i in range(count)]
        self._next += count
        return taken


@dataclass(slots=True)
class Side:
    """One engine of a comparison, and what all its runs came to."""

    engine: LoopEngine
    num_tokens: int = 0
    num_row_steps: int = 0
    accepted_tokens: int = 0

    def answer(self, prompts: Sequence[Sequence[int]], *, together: bool) -> float:
        """Tokens per second over these prompts, one after the other or all at once."""
        batches = [list(prompts)] if together else [[prompt] for prompt in prompts]
        runs = [self.engine.run(batch, MAX_TOKENS, ignore_eos=False) for batch in batches]
        self._count(runs)
        num_tokens = sum(len(ids) for run in runs for ids in run.output_ids)
        return num_tokens / sum(run.elapsed_s for run in runs)

    def _count(self, runs: Sequence[RunResult]) -> None:
        for run in runs:
            self.num_tokens += sum(map(len, run.output_ids))
            self.num_row_steps += run.num_row_steps
            self.accepted_tokens += run.accepted_tokens


def run_spec_benchmark(
    model_dir: Path,
    spec: SpecConfig,
    *,
    device: str,
    dtype: str,
    results_path: Path,
    num_blocks: int,
    console: Console,
) -> list[Figure]:
    """Measures everything, prints the table and writes the results.

    Args:
        device: "cpu" or "cuda". Goals are those of a CPU.
        spec: of a colocated draft, as it would serve.
    Raises: ConfigError: no colocated draft, or too few blocks.
    """
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(f"blocks is {num_blocks}, must be at least {MIN_BLOCKS} for a median")
    if not spec.is_colocated:
        raise ConfigError(
            f"the draft's method is '{spec.method}', which this benchmark does not measure; give a "
            "head, or a model with placement 'colocated'"
        )

    def progress(line: str) -> None:
        console.print(f"  {line}", highlight=False)

    with ExitStack() as stack:

        def open_engine(spec: SpecConfig | None, *, deterministic: bool = False) -> LoopEngine:
            engine = LoopEngine(
                model_dir,
                dtype=dtype,
                max_model_len=MAX_MODEL_LEN,
                spec=spec,
                deterministic=deterministic,
                device=device,
            )
            stack.callback(engine.close)
            return engine

        progress("loading")
        plain, sync = Side(open_engine(None)), Side(open_engine(replace(spec, overlap="off")))
        figures = _gains(plain, sync, num_blocks, progress)
        figures += _receipts(sync)
        figures.append(_host_ms(sync.engine, num_blocks))
        progress(f"{figures[-1].name} {figures[-1].value:.3f}")
        overlapped = Side(open_engine(replace(spec, overlap="on")))
        figures.append(
            _compare("v2_vs_v1", overlapped, sync, 1, num_blocks, progress, goal=OVERLAP_GOAL)
        )
        if device == "cpu":
            fixed = open_engine(None, deterministic=True)
            figures += [
                _deterministic_cost(fixed, plain.engine, bs, num_blocks, progress)
                for bs in (1, BATCH_SIZE)
            ]
    print_table(console, f"Speculation, {model_dir.name}, {dtype}, {device}", figures)
    write_results(
        results_path,
        figures,
        {
            "model": model_dir.name,
            "draft": Path(spec.draft_model).name,
            "dtype": dtype,
            "shape": [spec.num_steps, spec.topk, spec.num_draft_tokens],
        },
    )
    console.print(f"written to {results_path}", highlight=False)
    return figures


def _gains(plain: Side, sync: Side, num_blocks: int, progress: Progress) -> list[Figure]:
    return [
        _compare(name, sync, plain, bs, num_blocks, progress, goal=goal, code_only=code_only)
        for name, bs, code_only, goal in (
            ("spec_vs_plain_b1", 1, False, MIXED_GOAL),
            ("spec_vs_plain_code_b1", 1, True, CODE_GOAL),
            ("spec_vs_plain_b8", BATCH_SIZE, False, MIXED_BATCH_GOAL),
            ("spec_vs_plain_code_b8", BATCH_SIZE, True, CODE_BATCH_GOAL),
        )
    ]


def _compare(
    name: str,
    ours: Side,
    theirs: Side,
    bs: int,
    num_blocks: int,
    progress: Progress,
    *,
    goal: Goal,
    code_only: bool = False,
) -> Figure:
    """Tokens per second of one engine over another's, with `bs` requests at a time."""
    sides = [(side, PromptRounds(code_only=code_only)) for side in (ours, theirs)]
    per_block = 2 * BATCH_SIZE if bs > 1 else 6

    def rate(side: Side, rounds: PromptRounds) -> float:
        prompts = rounds.take(per_block)
        if bs == 1:
            return side.answer(prompts, together=False)
        halves = (prompts[:bs], prompts[bs:])
        return sum(side.answer(half, together=True) for half in halves) / len(halves)

    for side, _ in sides:  # a first run of each size warms allocators and the choice of depth
        side.engine.run(PromptRounds(code_only=code_only).take(bs), 16, ignore_eos=False)
    first, second = (partial(rate, *side) for side in sides)
    return measure_ratio(name, first, second, num_blocks=num_blocks, goal=goal, progress=progress)


def _receipts(side: Side) -> list[Figure]:
    """Over all runs so far, at every depth that was chosen."""
    steps = max(side.num_row_steps, 1)
    return [
        figure_of_blocks(
            "mean_accept_length", [side.accepted_tokens / steps], note="accepted drafts per step"
        ),
        figure_of_blocks("tokens_per_step", [side.num_tokens / steps], note="the bonus included"),
    ]


def _host_ms(engine: LoopEngine, num_blocks: int) -> Figure:
    """What the control plane adds to a step, planning and applying."""
    rounds = PromptRounds(code_only=False)
    costs = []
    for _ in range(num_blocks):
        run = engine.run(rounds.take(BATCH_SIZE), MAX_TOKENS, ignore_eos=False)
        costs.append(1e3 * (run.elapsed_s - run.execute_s) / run.num_steps)
    return figure_of_blocks("plan_apply_ms_b8", costs, HOST_GOAL, "per step, outside the executor")


def _deterministic_cost(
    fixed: LoopEngine, plain: LoopEngine, bs: int, num_blocks: int, progress: Progress
) -> Figure:
    rounds = [PromptRounds(code_only=False), PromptRounds(code_only=False)]

    def ms_per_step(engine: LoopEngine, prompts: PromptRounds) -> float:
        run = engine.run(prompts.take(bs), DETERMINISTIC_TOKENS)
        return 1e3 * run.elapsed_s / run.num_steps

    name = "deterministic_cost" if bs == 1 else f"deterministic_cost_b{bs}"
    return measure_ratio(
        name,
        partial(ms_per_step, fixed, rounds[0]),
        partial(ms_per_step, plain, rounds[1]),
        num_blocks=num_blocks,
        progress=progress,
    )
