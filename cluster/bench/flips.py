"""`bench flips`: how often rounding changes a token when a request is computed in other company.

Each request is decoded plainly and alone, then in a batch, and with drafts; where two outputs first
part, a token has flipped. What comes behind a flip follows from another text and is not compared.
With `deterministic` none may flip. What it costs a step is measured by `bench spec`, here what it
costs a prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from paceline.cluster.bench.engines import LoopEngine
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

MAX_MODEL_LEN = 1024
PROMPT_LEN = 512  # tokens, for the cost of a prompt
NO_FLIP = Goal(0.0, higher_is_better=False)
_TEMPERATURES = {"greedy": 0.0, "seeded": 0.8}
_NGRAM = SpecConfig(method="ngram", num_steps=3, topk=2, num_draft_tokens=8)
_PER_BATCH = 16
_PARTS = (1.0, 0.9, 0.75, 0.6)  # of each prompt, from its start, until there are enough


@dataclass(frozen=True, slots=True)
class FlipCount:
    num_reqs: int
    num_flips: int  # requests whose outputs part
    num_positions: int  # compared, that of each flip included

    @property
    def per_1000(self) -> float:
        return 1000 * self.num_flips / max(self.num_positions, 1)

    def __str__(self) -> str:
        return f"{self.num_flips} of {self.num_reqs} requests, {self.num_positions} tokens"


def count_flips(wanted: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> FlipCount:
    """One end before the other is a flip at the place where it is missing."""
    num_flips = num_positions = 0
    for want, have in zip(wanted, got, strict=True):
        length = max(len(want), len(have))
        place = next(
            (i for i in range(length) if list(want[i : i + 1]) != list(have[i : i + 1])), None
        )
        num_flips += place is not None
        num_positions += length if place is None else place + 1
    return FlipCount(len(wanted), num_flips, num_positions)


def flip_prompts(num_prompts: int) -> list[tuple[int, ...]]:
    """The prompts of `bench spec`, then their first parts. Raises: ConfigError: not so many."""
    texts = [prompt.ids for prompt in load_eval_prompts()]
    parts = (ids[: max(int(part * len(ids)), 1)] for part in _PARTS for ids in texts)
    found = list(dict.fromkeys(parts))  # chats begin alike
    if not 1 <= num_prompts <= len(found):
        raise ConfigError(f"num_prompts is {num_prompts}, must be in 1..{len(found)}")
    return found[:num_prompts]


def run_flips(
    model_dir: Path,
    spec: SpecConfig,
    *,
    dtype: str,
    num_prompts: int,
    max_tokens: int,
    results_path: Path,
    console: Console,
) -> list[Figure]:
    """Counts flips with and without `deterministic`, prints the table and writes the results.

    Args:
        spec: of a colocated draft; an n-gram draft is measured beside it.
    Raises: ConfigError: no colocated draft, or too many prompts.
    """
    if not spec.is_colocated:
        raise ConfigError(
            f"the draft's method is '{spec.method}'; give a head, or a model with placement "
            "'colocated'"
        )
    prompts = flip_prompts(num_prompts)
    bench = _Bench(model_dir, dtype, prompts, max_tokens, console)
    figures: list[Figure] = []
    for deterministic in (False, True):
        figures += bench.count(spec, deterministic=deterministic)
    figures.append(bench.prompt_cost())
    title = f"Flips per 1,000 tokens, {model_dir.name}, {dtype}"
    print_table(console, title, figures)
    write_results(
        results_path,
        figures,
        {
            "model": model_dir.name,
            "draft": Path(spec.draft_model).name,
            "dtype": dtype,
            "num_prompts": num_prompts,
            "max_tokens": max_tokens,
        },
    )
    console.print(f"written to {results_path}", highlight=False)
    return figures


@dataclass(frozen=True, slots=True)
class _Bench:
    model_dir: Path
    dtype: str
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    console: Console

    def count(self, spec: SpecConfig, *, deterministic: bool) -> list[Figure]:
        """Of each way to decode, under each rule; an engine's memory is given back after it."""
        with self._engine(None, deterministic=deterministic) as plain:
            alone = {rule: self._outputs(plain, rule, 1) for rule in _TEMPERATURES}
            found = {"batch": {rule: self._outputs(plain, rule) for rule in _TEMPERATURES}}
        ways = {
            "ngram": _NGRAM,
            spec.method: replace(spec, overlap="off"),
            f"{spec.method}_overlapped": replace(spec, overlap="on"),
        }
        for way, way_spec in ways.items():
            with self._engine(way_spec, deterministic=deterministic) as engine:
                found[way] = {rule: self._outputs(engine, rule) for rule in _TEMPERATURES}
        prefix = "deterministic_" if deterministic else ""
        figures = []
        for way, outputs in found.items():
            for rule in _TEMPERATURES:
                flips = count_flips(alone[rule], outputs[rule])
                name = f"{prefix}{way}_{rule}"
                goal = NO_FLIP if deterministic else None
                figures.append(figure_of_blocks(name, [flips.per_1000], goal, str(flips)))
                self._say(f"{name} {flips.per_1000:.3f}: {flips}")
        return figures

    def prompt_cost(self) -> Figure:
        """Time to the first token of a prompt that no cache holds, over the same without."""
        texts = iter(range(1 << 20))

        def first_token_ms(engine: LoopEngine) -> float:
            number = next(texts)
            prompt = [17 + (number * 7919 + i * i) % 4000 for i in range(PROMPT_LEN)]
            return 1e3 * engine.run([prompt], 1).first_token_s

        with (
            self._engine(None, deterministic=True) as fixed,
            self._engine(None, deterministic=False) as plain,
        ):
            for engine in (fixed, plain):
                first_token_ms(engine)
            return measure_ratio(
                "deterministic_prompt_cost",
                partial(first_token_ms, fixed),
                partial(first_token_ms, plain),
                num_blocks=MIN_BLOCKS,
                progress=self._say,
            )

    @contextmanager
    def _engine(self, spec: SpecConfig | None, *, deterministic: bool) -> Iterator[LoopEngine]:
        engine = LoopEngine(
            self.model_dir,
            dtype=self.dtype,
            max_model_len=MAX_MODEL_LEN,
            spec=spec,
            deterministic=deterministic,
        )
        try:
            yield engine
        finally:
            engine.close()

    def _outputs(self, engine: LoopEngine, rule: str, bs: int = _PER_BATCH) -> list[list[int]]:
        temperature = _TEMPERATURES[rule]
        outputs: list[list[int]] = []
        for start in range(0, len(self.prompts), bs):
            batch = self.prompts[start : start + bs]
            run = engine.run(batch, self.max_tokens, temperature, first_seed=start)
            outputs += run.output_ids
        return outputs

    def _say(self, line: str) -> None:
        self.console.print(f"  {line}", highlight=False)
