"""The same trees verified in three ways: from a plan, and by row on a CPU and as on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet
from paceline.kernels.reference.build_tree import build_tree_links
from paceline.kernels.registry import load_kernels
from paceline.worker.config import SpecConfig
from paceline.worker.sampler import NO_TOKEN, Sampler
from paceline.worker.step import Phase, ReqStep, SamplingRow, StepPlan
from paceline.worker.target.device_rows import DeviceSampler
from paceline.worker.target.verify import decide

REFERENCE = load_kernels("reference", "cpu")
WAYS = ("plan", "host rows", "dense rows")
COUPLED = SpecConfig()


@dataclass(frozen=True)
class Outcome:
    """Of one req; `new_ids` ends with NO_TOKEN where no token could be chosen."""

    new_ids: list[int]
    path: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Case:
    """The tree of one req, its root first; all trees of a batch are of one size."""

    sampling: SamplingRow
    draft_ids: Sequence[int]
    parents: Sequence[int]

    @property
    def seq_len(self) -> int:
        return len(self.sampling.prompt_ids) + len(self.sampling.output_ids) - 1


def trees_of(cases: Sequence[Case], device: str = "cpu") -> BuiltTrees:
    """As `build_tree` makes them of candidates, with QLEN_ONLY masks."""
    ids = torch.tensor([list(case.draft_ids) for case in cases])
    parents = torch.tensor([list(case.parents) for case in cases])
    bs, n = ids.shape
    cells = torch.zeros(bs, n, n, dtype=torch.bool)
    for b in range(bs):
        for i in range(n):
            cells[b, i] |= cells[b, parents[b, i]] if i else False
            cells[b, i, i] = True
    seq_lens = torch.tensor([case.seq_len for case in cases])
    positions = seq_lens[:, None] + cells.sum(-1) - 1
    links = build_tree_links(parents.to(device))
    return BuiltTrees(
        ids.to(device), links, positions.flatten().to(device), cells.flatten().to(device)
    )


def verify(
    way: str,
    cases: Sequence[Case],
    logits: Tensor,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    spec: SpecConfig = COUPLED,
    mask: Tensor | None = None,
    kernels: KernelSet = REFERENCE,
) -> list[Outcome]:
    """logits [sum of nodes, V], mask [sum of nodes, words]."""
    if way == "plan":
        sampler = Sampler(kernels, vocab_size, eos_token_ids, spec)
        plan = tuple(
            ReqStep(0, Phase.VERIFY, c.seq_len, tuple(c.draft_ids), parents=tuple(c.parents))
            for c in cases
        )
        sampling = [case.sampling for case in cases]
        decision = decide(StepPlan(0, plan), logits, sampling, sampler, kernels, mask=mask)
        return [
            Outcome([*row.new_ids, *([NO_TOKEN] if row.error else [])], [*path], [*row.logprobs])
            for row, path in zip(decision.rows, decision.paths, strict=True)
        ]
    device = str(logits.device)
    rows_cpu = list(range(1, len(cases) + 1))
    rows = torch.tensor(rows_cpu, device=device)
    sampler_of_rows = DeviceSampler(
        kernels,
        vocab_size,
        eos_token_ids,
        len(cases) + 1,
        logits.device,
        spec,
        is_dense=way == "dense rows",
    )
    sampler_of_rows.open_rows(rows_cpu, [case.sampling for case in cases])
    n = len(cases[0].draft_ids)
    seq_lens = torch.tensor([case.seq_len for case in cases], device=device)
    num_simulated = sampler_of_rows.simulate_step(n - 1)
    verdict = sampler_of_rows.verify(
        logits, trees_of(cases, device), rows, rows_cpu, seq_lens, n - 1, mask,
        num_simulated=num_simulated,
    )  # fmt: skip
    outcomes = []
    predict, logprobs = verdict.predict.tolist(), verdict.logprobs
    for b, nodes in enumerate(verdict.accept_index.tolist()):
        path = [node for node in nodes if node >= 0]
        assert len(path) == int(verdict.accept_length[b]) + 1
        told = [] if logprobs is None else logprobs[b, : len(path)].tolist()
        wants = cases[b].sampling.wants_logprobs
        new_ids = [predict[node] for node in path]
        kept = len(path) - (new_ids[-1] == NO_TOKEN)
        outcomes.append(
            Outcome(new_ids, [i - b * n for i in path][:kept], told[:kept] if wants else [])
        )
    return outcomes
