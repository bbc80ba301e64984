"""A target without a scheduler: decodes a few reqs in lockstep with a drafter, for draft tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.worker.config import (
    CacheConfig,
    KernelSetName,
    SchedulerConfig,
    SpecConfig,
    WorkerConfig,
)
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.drafter import DraftContext, Drafter
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import (
    PageId,
    Phase,
    ReqId,
    ReqStep,
    SamplingParams,
    SamplingRow,
    StepPlan,
)
from paceline.worker.target.build import build_executor

GREEDY = SamplingParams(seed=7, max_tokens=64, temperature=0.0)
SAMPLED = SamplingParams(seed=7, max_tokens=64, temperature=0.8, top_p=0.95, top_k=40)


def worker_config(
    model: Path,
    *,
    spec: SpecConfig | None = None,
    num_pages: int = 64,
    page_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    chunked_prefill_size: int = 512,
    max_num_batched_tokens: int = 2048,
    kernels: KernelSetName = "reference",
    device: str = "cpu",
) -> WorkerConfig:
    return WorkerConfig(
        model=load_model_config(model, max_model_len=max_model_len, dtype="float32"),
        cache=CacheConfig(page_size=page_size, num_pages=num_pages),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked_prefill_size=chunked_prefill_size,
        ),
        spec=spec or SpecConfig(),
        kernels=kernels,
        device=device,
    )


@dataclass(slots=True)
class TargetReq:
    req_id: ReqId
    prompt_ids: list[int]
    params: SamplingParams
    row: int
    output_ids: list[int] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)  # of steps that had a tree
    num_plain_steps: int = 0

    @property
    def is_done(self) -> bool:
        return len(self.output_ids) >= self.params.max_tokens


class SoloTarget:
    """Gives every req its own fixed pages; a draft is trusted with nothing but guesses."""

    def __init__(self, config: WorkerConfig) -> None:
        self._executor = build_executor(config)
        self._spec = config.spec
        self._pages_per_req = -(-config.model.max_model_len // config.cache.page_size)
        self._step_id = 0

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        drafter: Drafter | None = None,
        *,
        stop_id: int = -1,
    ) -> list[TargetReq]:
        reqs = [
            TargetReq(ReqId(f"req-{i}"), list(ids), replace(params, seed=params.seed + i), i + 1)
            for i, ids in enumerate(prompts)
        ]
        for req in reqs:
            first = self._step([self._prefill_row(req)], [req])[0]
            req.output_ids.extend(first)
        while running := [r for r in reqs if not r.is_done and r.output_ids[-1] != stop_id]:
            trees = self._draft(running, drafter)
            rows = [self._verify_row(r, tree) for r, tree in zip(running, trees, strict=True)]
            order = sorted(range(len(rows)), key=lambda i: rows[i].phase)
            news = self._step([rows[i] for i in order], [running[i] for i in order])
            for i, new_ids in zip(order, news, strict=True):
                self._commit(running[i], trees[i], new_ids, stop_id)
        if drafter is not None:
            drafter.close_reqs([req.req_id for req in reqs])
        return reqs

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _draft(
        self, reqs: Sequence[TargetReq], drafter: Drafter | None
    ) -> Sequence[DraftTree | None]:
        if drafter is None:
            return [None] * len(reqs)
        contexts = [
            DraftContext(
                req.req_id,
                req.prompt_ids,
                req.output_ids,
                req.params,
                min(self._spec.num_draft_tokens, req.params.max_tokens - len(req.output_ids)),
                req.accept_lengths[-1] if req.accept_lengths else 0,
            )
            for req in reqs
        ]
        return drafter.propose(contexts)

    def _step(self, rows: Sequence[ReqStep], reqs: Sequence[TargetReq]) -> list[tuple[int, ...]]:
        plan = StepPlan(self._step_id, tuple(rows))
        self._step_id += 1
        sampling = [SamplingRow(r.params, r.prompt_ids, r.output_ids) for r in reqs]
        return [row.new_ids for row in self._executor.execute(plan, sampling).rows]

    def _prefill_row(self, req: TargetReq) -> ReqStep:
        first_page = 1 + (req.row - 1) * self._pages_per_req
        pages = tuple(PageId(first_page + i) for i in range(self._pages_per_req))
        return ReqStep(req.row, Phase.PREFILL, 0, tuple(req.prompt_ids), pages=pages, num_logits=1)

    def _verify_row(self, req: TargetReq, tree: DraftTree | None) -> ReqStep:
        prefix_len = len(req.prompt_ids) + len(req.output_ids) - 1
        root = req.output_ids[-1]
        if tree is None:
            return ReqStep(req.row, Phase.DECODE, prefix_len, (root,))
        return ReqStep(
            req.row, Phase.VERIFY, prefix_len, (root, *tree.token_ids), parents=(-1, *tree.parents)
        )

    def _commit(
        self, req: TargetReq, tree: DraftTree | None, new_ids: tuple[int, ...], stop_id: int
    ) -> None:
        if tree is None:
            req.num_plain_steps += 1
        else:
            req.accept_lengths.append(len(new_ids) - 1)
        for token in new_ids:
            if req.is_done or req.output_ids[-1] == stop_id:
                return
            req.output_ids.append(token)
