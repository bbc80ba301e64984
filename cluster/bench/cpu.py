"""`bench cpu`: our speed against transformers on the same machine, weights and threads.

Speculation is off throughout: this measures the path under it. Prompts are random token ids, so
that neither side profits from what it has seen; all requests run past any end of sequence.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from paceline.cluster.bench.demo_memory import measure_demo_peak_gib
from paceline.cluster.bench.engines import LoopEngine, TransformersEngine
from paceline.cluster.bench.harness import (
    MIN_BLOCKS,
    Figure,
    Goal,
    figure_of_blocks,
    measure_ratio,
    print_table,
    write_results,
)
from paceline.cluster.bench.served import ServedEngine
from paceline.worker.errors import ConfigError

PROMPT_LEN = 64  # tokens
MAX_TOKENS = 64
PREFIX_LEN = 1000  # tokens shared in the prefix test
TAIL_LEN = 16  # tokens of its own that each request of the prefix test has
MAX_MODEL_LEN = 2048
BATCH_SIZES = (1, 8)

ENGINE_GOALS = {1: Goal(1.55, aim=2.0), 8: Goal(1.65, aim=2.0)}
SERVED_GOALS = {1: Goal(1.35), 8: Goal(1.5)}
PREFIX_GOAL = Goal(0.35, higher_is_better=False)
NOISE_GOAL = Goal(0.05, higher_is_better=False)
MEMORY_GOAL = Goal(5.0, higher_is_better=False)

Progress = Callable[[str], None]


class PromptSource:
    """Prompts of random ids that no earlier request has sent."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def take(self, length: int) -> list[int]:
        # Ids below 17 are SmolLM2's special tokens; they are no worse as prompts, only unusual.
        return [self._rng.randrange(17, self._vocab_size) for _ in range(length)]

    def batch(self, bs: int, length: int = PROMPT_LEN) -> list[list[int]]:
        return [self.take(length) for _ in range(bs)]


def run_cpu_benchmark(
    model_dir: Path,
    *,
    dtype: str,
    results_path: Path,
    num_blocks: int,
    with_demo: bool,
    console: Console,
) -> list[Figure]:
    """Measures everything, prints the table and writes the results.

    Raises: ConfigError: transformers is not installed, or too few blocks.
    """
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(f"blocks is {num_blocks}, must be at least {MIN_BLOCKS} for a median")
    theirs = _load_transformers(model_dir, dtype)
    prompts = PromptSource(theirs.vocab_size)

    def progress(line: str) -> None:
        console.print(f"  {line}", highlight=False)

    figures: list[Figure] = []
    with _loop_engine(model_dir, dtype) as ours:
        figures += _engine_figures(ours, theirs, prompts, num_blocks, progress)
        progress("starting a deployment")
        with ServedEngine(model_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN) as served:
            figures += _served_figures(served, theirs, prompts, num_blocks, progress)
            figures.append(_grpc_share(served, ours, prompts, num_blocks))
    if with_demo:
        progress("running the demo to measure its memory")
        peak_gib = measure_demo_peak_gib()
        figures.append(
            figure_of_blocks("demo_peak_rss_gib", [peak_gib], MEMORY_GOAL, "all its processes")
        )
    print_table(console, f"CPU benchmark, {model_dir.name}, {dtype}", figures)
    write_results(results_path, figures, {"model": model_dir.name, "dtype": dtype})
    console.print(f"written to {results_path}", highlight=False)
    return figures


def _load_transformers(model_dir: Path, dtype: str) -> TransformersEngine:
    try:
        return TransformersEngine(model_dir, dtype=dtype)
    except ImportError as error:
        raise ConfigError(
            "the benchmark compares with transformers, which is not installed; "
            "install the extra: pip install 'paceline[dev]'"
        ) from error


@contextmanager
def _loop_engine(model_dir: Path, dtype: str) -> Iterator[LoopEngine]:
    engine = LoopEngine(model_dir, dtype=dtype, max_model_len=MAX_MODEL_LEN)
    try:
        yield engine
    finally:
        engine.close()


def _engine_figures(
    ours: LoopEngine,
    theirs: TransformersEngine,
    prompts: PromptSource,
    num_blocks: int,
    progress: Progress,
) -> list[Figure]:
    ours.run(prompts.batch(1), 8)
    theirs.run(prompts.batch(1), 8)
    figures = _rates("engine", ours, theirs, prompts, ENGINE_GOALS, num_blocks, progress)
    for bs in BATCH_SIZES:
        shares = []
        for _ in range(num_blocks):
            before_s = ours.noise_s
            run = ours.run(prompts.batch(bs), MAX_TOKENS, temperature=0.8)
            shares.append((ours.noise_s - before_s) / run.elapsed_s)
        name = "noise_share" if bs == 1 else f"noise_share_b{bs}"
        figures.append(figure_of_blocks(name, shares, NOISE_GOAL, "of a step at temperature 0.8"))
        progress(f"{name} {figures[-1].value:.4f}")
    for bs in BATCH_SIZES:
        costs = []
        for _ in range(num_blocks):
            run = ours.run(prompts.batch(bs), MAX_TOKENS)
            costs.append(1e3 * (run.elapsed_s - run.execute_s) / run.num_steps)
        figures.append(
            figure_of_blocks(
                f"control_plane_ms_b{bs}", costs, note="per step, outside the executor"
            )
        )
        progress(f"{figures[-1].name} {figures[-1].value:.3f}")
    return figures


def _served_figures(
    served: ServedEngine,
    theirs: TransformersEngine,
    prompts: PromptSource,
    num_blocks: int,
    progress: Progress,
) -> list[Figure]:
    served.run(prompts.batch(1), 8)
    figures = _rates("served", served, theirs, prompts, SERVED_GOALS, num_blocks, progress)
    figures.append(
        measure_ratio(
            "prefix_hit_ttft_vs_miss",
            *_prefix_sides(served, prompts),
            num_blocks=num_blocks,
            goal=PREFIX_GOAL,
            progress=progress,
        )
    )
    return figures


def _rates(
    side: str,
    ours: LoopEngine | ServedEngine,
    theirs: TransformersEngine,
    prompts: PromptSource,
    goals: Mapping[int, Goal],
    num_blocks: int,
    progress: Progress,
) -> list[Figure]:
    """Tokens per second against transformers at each batch size."""

    def rate(engine: LoopEngine | ServedEngine | TransformersEngine, bs: int) -> float:
        return engine.run(prompts.batch(bs), MAX_TOKENS).tokens_per_s

    return [
        measure_ratio(
            f"{side}_vs_transformers_b{bs}",
            partial(rate, ours, bs),
            partial(rate, theirs, bs),
            num_blocks=num_blocks,
            goal=goals[bs],
            progress=progress,
        )
        for bs in BATCH_SIZES
    ]


def _grpc_share(
    served: ServedEngine, ours: LoopEngine, prompts: PromptSource, num_blocks: int
) -> Figure:
    """What front, controller and gRPC add to a request that the step loop alone would serve."""
    shares = []
    for _ in range(num_blocks):
        loop_s = ours.run(prompts.batch(1), MAX_TOKENS).elapsed_s
        shares.append(1 - loop_s / served.run(prompts.batch(1), MAX_TOKENS).elapsed_s)
    return figure_of_blocks("grpc_share_b1", shares, note="of a served request's time")


def _prefix_sides(
    served: ServedEngine, prompts: PromptSource
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Time to first token with a prefix the cache holds, and with one it has never seen."""
    shared = prompts.take(PREFIX_LEN)
    served.run([shared + prompts.take(TAIL_LEN)], 1)

    def hit() -> float:
        return served.run([shared + prompts.take(TAIL_LEN)], 1).first_token_s

    def miss() -> float:
        return served.run([prompts.take(PREFIX_LEN + TAIL_LEN)], 1).first_token_s

    return hit, miss
