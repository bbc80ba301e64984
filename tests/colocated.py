"""A target with a colocated draft and without a scheduler: what its reqs say, step by step.

Reqs arrive one step after the other, so that prompts, chunks and trees share steps. Each has pages
of its own, scattered over the pool, and is given no more of them than the contract says. With an
executor that overlaps, a step is launched before the one before it is collected.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.worker.config import (
    CacheConfig,
    KernelSetName,
    SchedulerConfig,
    SpecConfig,
    SpecMethod,
    WorkerConfig,
)
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.commit import commit_tokens
from paceline.worker.spec.limits import max_tree_nodes, reserve_len
from paceline.worker.step import (
    PendingStep,
    Phase,
    ReqStep,
    RowResult,
    SamplingParams,
    SamplingRow,
    SpecShape,
    StepPlan,
)
from paceline.worker.target.executor import Executor

GREEDY = SamplingParams(seed=3, max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9)


def spec_config(
    method: SpecMethod,
    draft: Path,
    *,
    num_steps: int = 3,
    topk: int = 1,
    num_draft_tokens: int = 0,
    **options: object,
) -> SpecConfig:
    """num_draft_tokens 0: a chain's, or a tree of some branches."""
    most = max_tree_nodes(num_steps, topk)
    base = SpecConfig(
        method=method,
        draft_model=str(draft),
        placement="colocated",
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens or min(2 * topk + num_steps, most),
        overlap="off",
    )
    return replace(base, **options)  # type: ignore[arg-type]  # fields of SpecConfig


def config_of(
    model: Path,
    spec: SpecConfig | None = None,
    *,
    page_size: int = 4,
    num_pages: int = 0,
    max_num_seqs: int = 4,
    max_model_len: int = 96,
    kernels: KernelSetName = "reference",
    device: str = "cpu",
    dtype: str = "float32",
) -> WorkerConfig:
    """num_pages 0: enough for all reqs, whatever their steps reserve."""
    pages_per_req = -(-(max_model_len + 64) // page_size)
    return WorkerConfig(
        model=load_model_config(model, max_model_len=max_model_len, dtype=dtype),
        cache=CacheConfig(page_size=page_size, num_pages=num_pages or max_num_seqs * pages_per_req),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        spec=spec or SpecConfig(),
        kernels=kernels,
        device=device,
        num_threads=1,
    )


def default_shape(spec: SpecConfig) -> SpecShape:
    return SpecShape(spec.num_steps, spec.topk, spec.num_draft_tokens)


@dataclass
class ColocatedReq:
    prompt_ids: list[int]
    params: SamplingParams
    row: int  # of req_to_token
    pages: list[int]  # that it may be given, in order
    arrives: int = 0  # the step in which its prompt begins
    output_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)  # of steps that verified drafts
    num_steps: int = 0  # that gave tokens
    error: str = ""
    is_done: bool = False
    num_computed: int = 0  # of the prefill
    num_sent_pages: int = 0

    num_resumed: int = 0  # output tokens that its prefill computes again

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def prefill_ids(self) -> list[int]:
        return self.prompt_ids + self.output_ids[: self.num_resumed]

    @property
    def prefix_len(self) -> int:
        """Committed and computed, as the host knows it."""
        if self.num_computed < len(self.prefill_ids):
            return self.num_computed
        return len(self.prompt_ids) + max(len(self.output_ids), self.num_resumed + 1) - 1

    def resume(self, other: "ColocatedReq") -> None:
        """Goes on where `other` was."""
        self.prompt_ids, self.output_ids = list(other.prompt_ids), list(other.output_ids)
        self.num_resumed = len(self.output_ids)

    def sampling(self) -> SamplingRow:
        return SamplingRow(self.params, self.prompt_ids, self.output_ids)

    def give_pages(self, num_tokens: int, page_size: int) -> tuple[int, tuple[int, ...]]:
        """(page_start, pages) that the row lacks for `num_tokens`."""
        start, stop = self.num_sent_pages, -(-num_tokens // page_size)
        assert stop <= len(self.pages), "the test gave the req too few pages"
        self.num_sent_pages = max(start, stop)
        return start, tuple(self.pages[start:stop])


class ColocatedTarget:
    """Runs reqs to their end. With an executor without a draft they are decoded plainly."""

    def __init__(
        self,
        executor: Executor,
        *,
        chunk_size: int = 512,
        shapes: Callable[[int], SpecShape] | None = None,
        on_plan: Callable[[StepPlan], StepPlan] | None = None,
    ) -> None:
        """shapes: of each step by its number; on_plan: may look at a plan, or change it."""
        config = executor.config
        self.executor = executor
        self.plans: list[StepPlan] = []
        self._spec = config.spec
        self._max_model_len = config.model.max_model_len
        self._eos_token_ids = config.model.eos_token_ids
        self._reserve = reserve_len(config.spec, executor.is_overlapped)
        self._chunk_size = chunk_size
        self._shapes = shapes or (lambda step: default_shape(config.spec))
        self._on_plan = on_plan or (lambda plan: plan)

    def make_reqs(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[ColocatedReq]:
        """Each its seed, its row and every n-th page, from the last backwards."""
        all_params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        num = len(prompts)
        pages = list(range(self.executor.num_pages, 0, -1))
        return [
            ColocatedReq(list(prompt), replace(p, seed=p.seed + i), i + 1, pages[i::num], i)
            for i, (prompt, p) in enumerate(zip(prompts, all_params, strict=True))
        ]

    def run(self, reqs: Sequence[ColocatedReq]) -> list[list[int]]:
        """Returns the outputs."""
        in_flight: deque[tuple[PendingStep, list[ColocatedReq], StepPlan]] = deque()
        depth = 1 if self.executor.is_overlapped else 0
        for step in range(10_000):
            running = [req for req in reqs if not req.is_done and req.arrives <= step]
            if not running and not in_flight and all(req.is_done for req in reqs):
                return [req.output_ids for req in reqs]
            if running:
                in_flight.append(self._launch(step, running))
            while len(in_flight) > (depth if running else 0):
                self._collect(*in_flight.popleft())
        raise AssertionError("the reqs do not come to an end")

    def _launch(
        self, step: int, running: Sequence[ColocatedReq]
    ) -> tuple[PendingStep, list[ColocatedReq], StepPlan]:
        built = [(self._row(req), req) for req in running]
        built.sort(key=lambda pair: pair[0].phase is Phase.PREFILL)
        shape = self._shapes(step) if self._spec.is_colocated else None
        plan = self._on_plan(StepPlan(step, tuple(row for row, _ in built), shape))
        self.plans.append(plan)
        sampling = [req.sampling() if row.num_logits else None for row, req in built]
        return self.executor.launch(plan, sampling), [req for _, req in built], plan

    def _row(self, req: ColocatedReq) -> ReqStep:
        page_size, prefix_len = self.executor.page_size, req.prefix_len
        if req.num_computed < len(req.prefill_ids):
            stop = min(prefix_len + self._chunk_size, len(req.prefill_ids))
            is_last = stop == len(req.prefill_ids)
            page_start, pages = req.give_pages(stop, page_size)
            req.num_computed = stop
            return ReqStep(
                req.row,
                Phase.PREFILL,
                prefix_len,
                tuple(req.prefill_ids[prefix_len:stop]),
                page_start,
                pages,
                num_logits=1 if is_last else 0,
                next_id=-1 if is_last else req.prefill_ids[stop],
            )
        is_colocated = self._spec.is_colocated
        phase = Phase.SPECULATE if is_colocated else Phase.DECODE
        num_owned = prefix_len + (self._reserve if is_colocated else 1)
        page_start, pages = req.give_pages(num_owned, page_size)
        root = () if self.executor.is_overlapped else (req.output_ids[-1],)
        return ReqStep(req.row, phase, prefix_len, root, page_start, pages)

    def _collect(self, pending: PendingStep, reqs: Sequence[ColocatedReq], plan: StepPlan) -> None:
        reply = pending.collect()
        assert reply.step_id == plan.step_id
        for req, row, result in zip(reqs, plan.rows, reply.rows, strict=True):
            if not req.is_done and row.num_logits:
                self._commit(req, result)

    def _commit(self, req: ColocatedReq, result: RowResult) -> None:
        done = commit_tokens(
            result.new_ids,
            num_output_before=len(req.output_ids),
            num_total_before=len(req.prompt_ids) + len(req.output_ids),
            params=req.params,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self._max_model_len,
        )
        req.output_ids.extend(done.emitted)
        req.num_steps += 1
        if result.num_proposed:
            req.accept_lengths.append(result.accept_length)
        req.error = result.error
        req.is_done = done.finish_reason is not None or bool(
            result.error and not result.num_proposed
        )
