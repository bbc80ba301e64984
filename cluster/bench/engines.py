"""The two sides of `bench cpu` in one process: our step loop, and transformers' generate."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.group.step_loop import NewReq, ReqEvent, ReqReceipt, Sink, StepLoop
from paceline.worker.config import CacheConfig, SchedulerConfig, SpecConfig, WorkerConfig
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.step import PendingStep, ReqId, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor

RUN_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """One batch of requests, from submitting the first to the end of the last."""

    output_ids: list[list[int]]
    elapsed_s: float
    first_token_s: float = 0.0  # of the batch
    execute_s: float = 0.0  # inside the executor
    num_steps: int = 0
    num_row_steps: int = 0  # those of each request that emitted tokens, added up
    accepted_tokens: int = 0  # of drafts

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.output_ids)) / self.elapsed_s


class _TimedExecutor:
    """Adds up the time inside the executor; what a step takes beyond it is the control plane."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.execute_s = 0.0

    @property
    def num_pages(self) -> int:
        return self._executor.num_pages

    @property
    def is_overlapped(self) -> bool:
        return self._executor.is_overlapped

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        start = time.perf_counter()
        pending = self._executor.launch(plan, sampling)
        self.execute_s += time.perf_counter() - start
        return pending

    def heartbeat(self) -> None:
        self._executor.heartbeat()


class LoopEngine:
    """Our executor and step loop at TP=1, without any process or network in between.

    Steps run on the caller's thread, as transformers does: a second thread that computes would
    have OpenMP threads of its own, and with more of these than cores neither pool may wait awake.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        max_model_len: int,
        spec: SpecConfig | None = None,
        deterministic: bool = False,
        device: str = "cpu",
    ) -> None:
        spec = spec or SpecConfig()
        model = load_model_config(str(model_dir), max_model_len=max_model_len, dtype=dtype)
        config = WorkerConfig(model, spec=spec, deterministic=deterministic, device=device)
        self._executor = build_executor(config)
        self._timed = _TimedExecutor(self._executor)
        self._loop = StepLoop(
            self._timed,
            NgramDrafter(spec) if spec.method == "ngram" else None,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(),
            spec=spec,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
        )
        self._num_runs = 0

    @property
    def noise_s(self) -> float:
        """Seconds spent on sampling noise so far."""
        return self._executor.sampler.stats.noise_s

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float = 0.0,
        *,
        ignore_eos: bool = True,
        first_seed: int = 0,
    ) -> RunResult:
        """All prompts at once, `max_tokens` each at most; prompt i has the seed first_seed + i.

        Raises TimeoutError: RUN_LIMIT_S passed. RuntimeError: a request failed.
        """
        outputs: list[list[int]] = [[] for _ in prompts]
        first_at: list[float] = []
        errors: list[Exception] = []
        receipts: list[ReqReceipt] = []

        def sink_for(output_ids: list[int]) -> Sink:
            def sink(event: ReqEvent) -> None:
                if event.new_ids and not first_at:
                    first_at.append(time.perf_counter())
                output_ids.extend(event.new_ids)
                if event.error is not None:
                    errors.append(event.error)
                if event.receipt is not None:
                    receipts.append(event.receipt)

            return sink

        first_step, execute_s = self._loop.step_id, self._timed.execute_s
        start = time.perf_counter()
        for i, (prompt, output_ids) in enumerate(zip(prompts, outputs, strict=True)):
            params = SamplingParams(
                seed=first_seed + i,
                max_tokens=max_tokens,
                temperature=temperature,
                ignore_eos=ignore_eos,
            )
            req_id = ReqId(f"bench-{self._num_runs}-{i}")
            self._loop.submit(NewReq(req_id, list(prompt), [], params), sink_for(output_ids))
        while self._loop.step_once():
            if time.perf_counter() - start > RUN_LIMIT_S:
                raise TimeoutError(f"{len(prompts)} requests did not end in {RUN_LIMIT_S:g} s")
        elapsed = time.perf_counter() - start
        self._num_runs += 1
        if errors:
            raise RuntimeError(f"a request of the benchmark failed: {errors[0]}") from errors[0]
        return RunResult(
            outputs,
            elapsed,
            first_token_s=first_at[0] - start if first_at else 0.0,
            execute_s=self._timed.execute_s - execute_s,
            num_steps=self._loop.step_id - first_step,
            num_row_steps=sum(receipt.num_steps for receipt in receipts),
            accepted_tokens=sum(receipt.accepted_tokens for receipt in receipts),
        )

    def close(self) -> None:
        self._loop.stop()
        self._executor.shutdown()


class TransformersEngine:
    """`generate` of transformers with its own cache, the yardstick."""

    def __init__(self, model_dir: Path, *, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.vocab_size: int = self.model.config.vocab_size

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> RunResult:
        """Prompts of equal length in one batch, greedy."""
        import torch

        ids = torch.tensor(prompts)  # [bs, prompt_len]
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        elapsed = time.perf_counter() - start
        return RunResult(out[:, ids.shape[1] :].tolist(), elapsed)
