"""Runs speculative against plain decoding of one model in this process, and judges.

Two things are compared: the tokens, greedy and by seed, one request at a time and all together; and
how sampled tokens are distributed, against what the model says exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.cluster.config import ClusterConfig
from paceline.cluster.group.corpus import load_corpus
from paceline.cluster.group.settings import ModelRef, find_model
from paceline.cluster.lossless.distribution import (
    DistributionCheck,
    check_distribution,
    make_cells,
)
from paceline.cluster.lossless.engine import Answer, Ask, Engine
from paceline.cluster.lossless.prompts import MAX_PROMPTS, load_prompts
from paceline.cluster.lossless.tokens import (
    Difference,
    TokenCheck,
    first_difference,
    judge_difference,
)
from paceline.worker.config import SpecConfig, WorkerConfig
from paceline.worker.errors import ConfigError
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.limits import reserve_len
from paceline.worker.step import SamplingParams

if TYPE_CHECKING:
    from paceline.worker.spec.drafter import Drafter

MIN_SAMPLES = 100
_CELL_DEPTH, _CELL_WIDTH = 3, 3  # tokens of a text; the first is the prompt's, then a tree's
_MAX_DISTRIBUTIONS = 2  # prompts whose distribution is checked
_FALSE_ALARMS = 1e-3  # how often chance alone may fail a whole run
_DRAFT_TIMEOUT_S = 60.0  # nobody is waiting: a round shall never be late

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    num_prompts: int = 4
    max_tokens: int = 48
    num_samples: int = 400  # per distribution; 0 checks none
    temperature: float = 0.8  # of what is sampled

    def check(self) -> None:
        """Raises: ConfigError: a value is outside its bounds."""
        if not 1 <= self.num_prompts <= MAX_PROMPTS:
            raise ConfigError(f"--num-prompts is {self.num_prompts}; it must be 1..{MAX_PROMPTS}")
        if self.max_tokens < 2:
            raise ConfigError(
                f"--max-tokens is {self.max_tokens}; it must be 2 or more: the first token of an "
                "answer follows from its prompt, without a draft"
            )
        if self.num_samples and self.num_samples < MIN_SAMPLES:
            raise ConfigError(
                f"--num-samples is {self.num_samples}; it must be 0 for none, or {MIN_SAMPLES} or "
                "more: fewer show nothing"
            )
        if not 0.01 <= self.temperature <= 100.0:
            raise ConfigError(f"--temperature is {self.temperature:g}; it must be in 0.01..100")


@dataclass(frozen=True, slots=True)
class Report:
    tokens: tuple[TokenCheck, ...]
    distributions: tuple[DistributionCheck, ...]

    @property
    def num_proposed(self) -> int:
        return sum(check.num_proposed for check in self.tokens)

    @property
    def num_flips(self) -> int:
        return sum(len(check.flips) for check in self.tokens)

    @property
    def num_errors(self) -> int:
        return sum(len(check.errors) for check in self.tokens)

    @property
    def is_lossless(self) -> bool:
        """Nothing that drafted nothing has been shown to be."""
        return (
            self.num_proposed > 0
            and self.num_errors == 0
            and all(check.is_met for check in self.distributions)
        )


def verify(config: ClusterConfig, device: str, options: Options, tell: Tell) -> Report:
    """
    Args:
        config: resolved, with a draft.
    Raises: ConfigError: options or sizes that cannot be; and as `build_executor`.
    """
    options.check()
    spec = config.draft.spec_config(device)
    if spec.method == "none":
        raise ConfigError("there is no draft, so nothing to verify; name one with --draft")
    prompts = load_prompts(find_model(ModelRef(config.model)), options.num_prompts)
    worker = _worker_config(config, device, prompts, options)
    tell(f"loading {config.names[0]} without a draft")
    cache = replace(worker.cache, enable_prefix_caching=False)
    with Engine(replace(worker, spec=SpecConfig(), cache=cache)) as plain:
        tell(f"loading {config.names[0]} with draft {config.draft.model or spec.method}")
        spec = _with_draft(spec, config)
        speculating = replace(worker, spec=spec)
        with Engine(speculating, _drafter(config, speculating)) as drafted:
            tokens = _Tokens(prompts, options, plain, drafted, worker).check(spec, tell)
            distributions = _check_distributions(prompts, options, plain, drafted, tell)
    return Report(tuple(tokens), tuple(distributions))


class _Tokens:
    """Answers of both engines, compared; those of the plain one are asked for once."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        options: Options,
        plain: Engine,
        drafted: Engine,
        worker: WorkerConfig,
    ) -> None:
        self._prompts = prompts
        self._options = options
        self._plain = plain
        self._drafted = drafted
        self._worker = worker

    def check(self, spec: SpecConfig, tell: Tell) -> list[TokenCheck]:
        checks = []
        for name, temperature in (("greedy", 0.0), ("seeded", self._options.temperature)):
            if temperature > 0.0 and spec.rule == "rejection":
                continue  # by chance, not by seed: the distributions tell
            params = [
                SamplingParams(
                    seed=1000 + i,
                    max_tokens=self._options.max_tokens,
                    temperature=temperature,
                    ignore_eos=True,
                )
                for i in range(len(self._prompts))
            ]
            asks = [Ask(ids, p) for ids, p in zip(self._prompts, params, strict=True)]
            tell(f"{name}: plain, one at a time")
            wanted = [answer for ask in asks for answer in self._plain.answer([ask])]
            tell(f"{name}: speculative, one at a time")
            alone = [answer for ask in asks for answer in self._drafted.answer([ask])]
            checks.append(self._compare(f"{name}, one at a time", asks, wanted, alone))
            if len(asks) > 1:
                tell(f"{name}: speculative, {len(asks)} at once")
                together = self._drafted.answer(asks)
                checks.append(self._compare(f"{name}, {len(asks)} at once", asks, wanted, together))
        return checks

    def _compare(
        self, name: str, asks: Sequence[Ask], wanted: Sequence[Answer], got: Sequence[Answer]
    ) -> TokenCheck:
        answers = list(got)
        num_tokens, differences = 0, []
        for i, (ask, want, have) in enumerate(zip(asks, wanted, got, strict=True)):
            output_ids = have.output_ids
            while True:
                place = first_difference(want.output_ids, output_ids)
                if place is None:
                    num_tokens += len(want.output_ids)
                    break
                found = self._judge(i, ask, want.output_ids, output_ids, place)
                differences.append(found)
                if not found.is_tie or place + 1 == len(want.output_ids):
                    num_tokens += place
                    break
                # Behind a flip both go on from the same tokens, so that all of them are compared.
                (more,) = self._drafted.answer([_rest_of(ask, want.output_ids[: place + 1])])
                answers.append(more)
                output_ids = want.output_ids[: place + 1] + more.output_ids
        receipts = [answer.receipt for answer in answers if answer.receipt is not None]
        return TokenCheck(
            name,
            num_tokens,
            tuple(differences),
            num_steps=sum(receipt.num_steps for receipt in receipts),
            num_proposed=sum(receipt.proposed_tokens for receipt in receipts),
            num_accepted=sum(receipt.accepted_tokens for receipt in receipts),
            are_flips_allowed=not self._worker.deterministic,
        )

    def _judge(
        self, prompt: int, ask: Ask, wanted: Sequence[int], got: Sequence[int], place: int
    ) -> Difference:
        return judge_difference(
            prompt,
            ask.prompt_ids,
            wanted,
            got,
            place,
            ask.params,
            self._worker.model.dtype,
            self._plain.next_logits,
        )


def _rest_of(ask: Ask, output_ids: Sequence[int]) -> Ask:
    """What is still to be answered behind some of the answer; a token's noise goes by its place."""
    params = replace(ask.params, max_tokens=ask.params.max_tokens - len(output_ids))
    return Ask([*ask.prompt_ids, *output_ids], params)


def _check_distributions(
    prompts: Sequence[list[int]], options: Options, plain: Engine, drafted: Engine, tell: Tell
) -> list[DistributionCheck]:
    if options.num_samples == 0:
        return []
    chosen = prompts[:_MAX_DISTRIBUTIONS]
    checks = []
    for i, prompt_ids in enumerate(chosen):
        tell(f"distribution {i + 1} of {len(chosen)}: exact, then {options.num_samples} samples")
        cells = make_cells(
            plain.next_logits,
            prompt_ids,
            depth=_CELL_DEPTH,
            width=_CELL_WIDTH,
            temperature=options.temperature,
        )
        asks = [
            Ask(
                prompt_ids,
                SamplingParams(
                    seed=seed,
                    # One more than is looked at, so that none of these is cut short.
                    max_tokens=_CELL_DEPTH + 1,
                    temperature=options.temperature,
                    ignore_eos=True,
                ),
            )
            for seed in range(options.num_samples)
        ]
        outputs = [answer.output_ids for answer in drafted.answer(asks)]
        checks.append(check_distribution(i, cells, outputs, _FALSE_ALARMS / len(chosen)))
    return checks


# ---- what is built


def _worker_config(
    config: ClusterConfig, device: str, prompts: Sequence[list[int]], options: Options
) -> WorkerConfig:
    """Of one rank; the pool is as large as what is asked needs, since two lie side by side."""
    model = load_model_config(
        find_model(ModelRef(config.model)),
        max_model_len=config.max_model_len,
        dtype=config.dtype,
    )
    longest = max(map(len, prompts))
    needed_len = longest + max(options.max_tokens, _CELL_DEPTH + 1)
    if needed_len > model.max_model_len:
        raise ConfigError(
            f"the longest prompt has {longest} tokens and --max-tokens is {options.max_tokens}, "
            f"but prompt and answer together may have {model.max_model_len}; lower --max-tokens"
        )
    scheduler = config.scheduler_config()
    spec = config.draft.spec_config(device)
    num_tokens = needed_len + reserve_len(spec, overlap=True) + spec.num_draft_tokens
    pages_per_req = -(-num_tokens // config.cache.page_size) + 1
    return WorkerConfig(
        replace(model, max_model_len=needed_len),
        cache=config.cache_config(num_pages=pages_per_req * (scheduler.max_num_seqs + 1)),
        scheduler=scheduler,
        kernels=config.kernels,
        device=device,
        num_threads=config.ray.threads_per_rank,
        deterministic=config.deterministic,
    )


def _with_draft(spec: SpecConfig, config: ClusterConfig) -> SpecConfig:
    spec = replace(spec, draft_timeout_s=max(spec.draft_timeout_s, _DRAFT_TIMEOUT_S))
    if not spec.is_colocated:
        return spec
    return replace(spec, draft_model=str(find_model(ModelRef(config.draft.model))))


def _drafter(config: ClusterConfig, worker: WorkerConfig) -> "Drafter | None":
    """On the host; None where the rank drafts by itself."""
    spec = worker.spec
    if spec.is_colocated:
        return None
    if spec.method == "ngram":
        from paceline.worker.spec.ngram import NgramDrafter

        return NgramDrafter(spec, corpus=load_corpus(spec, worker.model))
    from paceline.worker.draft.proposer import build_proposer
    from paceline.worker.link.local_link import LocalLink
    from paceline.worker.spec.link_drafter import LinkDrafter

    model = load_model_config(find_model(ModelRef(config.draft.model)), dtype=config.dtype)
    model = replace(model, max_model_len=min(model.max_model_len, worker.model.max_model_len))
    proposer = build_proposer(replace(worker, model=model))
    return LinkDrafter(LocalLink(proposer), spec, vocab_size=worker.model.vocab_size)
