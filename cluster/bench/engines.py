"""The two sides of `bench cpu` in one process: our step loop, and transformers' generate."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.group.step_loop import NewReq, ReqEvent, StepLoop
from paceline.worker.config import CacheConfig, SchedulerConfig, SpecConfig, WorkerConfig
from paceline.worker.models.registry import load_model_config
from paceline.worker.step import ReqId, SamplingParams, SamplingRow, StepPlan, StepReply
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

    def execute(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> StepReply:
        start = time.perf_counter()
        reply = self._executor.execute(plan, sampling)
        self.execute_s += time.perf_counter() - start
        return reply

    def heartbeat(self) -> None:
        self._executor.heartbeat()


class LoopEngine:
    """Our executor and step loop at TP=1, without any process or network in between."""

    def __init__(self, model_dir: Path, *, dtype: str, max_model_len: int) -> None:
        model = load_model_config(str(model_dir), max_model_len=max_model_len, dtype=dtype)
        self._executor = build_executor(WorkerConfig(model))
        self._timed = _TimedExecutor(self._executor)
        self._loop = StepLoop(
            self._timed,
            None,
            cache=CacheConfig(),
            scheduler=SchedulerConfig(),
            spec=SpecConfig(),
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
        )
        self._thread = threading.Thread(target=self._loop.run, name="step-loop", daemon=True)
        self._thread.start()
        self._num_runs = 0

    @property
    def noise_s(self) -> float:
        """Seconds spent on sampling noise so far."""
        return self._executor.sampler.stats.noise_s

    def run(
        self, prompts: Sequence[list[int]], max_tokens: int, temperature: float = 0.0
    ) -> RunResult:
        """All prompts at once, `max_tokens` each, past any end of sequence.

        Raises TimeoutError: RUN_LIMIT_S passed. RuntimeError: a request failed.
        """
        outputs: list[list[int]] = [[] for _ in prompts]
        first = threading.Event()
        first_at = [0.0]
        left = threading.Semaphore(0)
        errors: list[Exception] = []

        def sink_for(i: int):  # type: ignore[no-untyped-def]  # a closure per request
            def sink(event: ReqEvent) -> None:
                if event.new_ids and not first.is_set():
                    first_at[0] = time.perf_counter()
                    first.set()
                outputs[i].extend(event.new_ids)
                if event.error is not None:
                    errors.append(event.error)
                if event.finish_reason is not None or event.error is not None:
                    left.release()

            return sink

        first_step, execute_s = self._loop.step_id, self._timed.execute_s
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                seed=i, max_tokens=max_tokens, temperature=temperature, ignore_eos=True
            )
            req_id = ReqId(f"bench-{self._num_runs}-{i}")
            self._loop.submit(NewReq(req_id, list(prompt), [], params), sink_for(i))
        for _ in prompts:
            if not left.acquire(timeout=RUN_LIMIT_S):
                raise TimeoutError(f"{len(prompts)} requests did not end in {RUN_LIMIT_S:g} s")
        elapsed = time.perf_counter() - start
        self._num_runs += 1
        if errors:
            raise RuntimeError(f"a request of the benchmark failed: {errors[0]}") from errors[0]
        return RunResult(
            outputs,
            elapsed,
            first_token_s=first_at[0] - start,
            execute_s=self._timed.execute_s - execute_s,
            num_steps=self._loop.step_id - first_step,
        )

    def close(self) -> None:
        self._loop.stop()
        self._thread.join(timeout=10)
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
