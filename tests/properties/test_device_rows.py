"""Tokens from rows on the device are those from the reqs' own lists, whatever the trees."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.api import BuiltTrees
from paceline.kernels.reference.build_tree import build_tree_links
from paceline.kernels.registry import load_kernels
from paceline.worker.config import SpecConfig
from paceline.worker.sampler import NO_TOKEN, Sampler
from paceline.worker.step import Phase, ReqStep, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.device_rows import DeviceSampler, Verdict
from paceline.worker.target.verify import decide

KERNELS = load_kernels("reference", "cpu")
CPU = torch.device("cpu")
VOCAB, EOS, NUM_ROWS = 40, 2, 9

PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.5, 0.8, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    min_tokens=st.sampled_from([0, 0, 3, 12]),
    stop_token_ids=st.sampled_from([(), (9,), (VOCAB + 7,)]),
    ignore_eos=st.booleans(),
    logit_bias=st.sampled_from([(), ((4, 1.5), (2, -1.0), (4, 0.5), (VOCAB, 9.0))]),
)


@dataclass
class Req:
    row: int
    params: SamplingParams
    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)

    @property
    def sampling(self) -> SamplingRow:
        return SamplingRow(self.params, self.prompt_ids, self.output_ids)


def trees_of(
    draft_ids: list[list[int]], parents: list[list[int]], seq_lens: list[int]
) -> BuiltTrees:
    ids = torch.tensor(draft_ids)
    bs, n = ids.shape
    cells = torch.zeros(bs, n, n, dtype=torch.bool)
    for b in range(bs):
        for i in range(n):
            cells[b, i, i] = True
            if i:
                cells[b, i] |= cells[b, parents[b][i]]
    depths = cells.sum(-1) - 1
    positions = (torch.tensor(seq_lens)[:, None] + depths).flatten()
    return BuiltTrees(ids, build_tree_links(torch.tensor(parents)), positions, cells.flatten())


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Req], list[tuple[list[list[int]], list[list[int]]]]]:
    """Reqs on rows of their own, and for each of some steps a tree per req."""
    bs = draw(st.integers(1, 4))
    rows = draw(st.permutations(range(1, NUM_ROWS)))[:bs]
    ids = st.integers(0, VOCAB - 1)
    reqs = [
        Req(
            row,
            draw(PARAMS),
            draw(st.lists(ids, min_size=1, max_size=6)),
            draw(st.lists(ids, max_size=3)),
        )
        for row in rows
    ]
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, 7))
        all_ids, all_parents = [], []
        for _ in range(bs):
            draft_ids, parents = [0], [-1]
            for i in range(1, n):
                parents.append(draw(st.integers(0, i - 1)))
                draft_ids.append(draw(st.integers(0, VOCAB + 1)))
            all_ids.append(draft_ids)
            all_parents.append(parents)
        steps.append((all_ids, all_parents))
    return reqs, steps


def new_ids_of(verdict: Verdict) -> list[list[int]]:
    return [[int(verdict.predict[i]) for i in row if i >= 0] for row in verdict.accept_index]


def device_sampler(spec: SpecConfig, *, is_dense: bool | None = True) -> DeviceSampler:
    return DeviceSampler(KERNELS, VOCAB, (EOS,), NUM_ROWS, CPU, spec, is_dense=is_dense)


@pytest.mark.parametrize("is_dense", [True, False])
@settings(max_examples=120, deadline=None)
@given(batch=batches(), seed=st.integers(0, 2**31), num_broken=st.sampled_from([0, 0, 1, 3]))
def test_verify_chooses_what_the_host_chooses(
    batch: tuple[list[Req], list[tuple[list[list[int]], list[list[int]]]]],
    seed: int,
    num_broken: int,
    is_dense: bool,
) -> None:
    reqs, steps = batch
    generator = torch.Generator().manual_seed(seed)
    device = device_sampler(SpecConfig(), is_dense=is_dense)
    host = Sampler(KERNELS, VOCAB, (EOS,))
    rows_cpu = [req.row for req in reqs]
    rows = torch.tensor(rows_cpu)
    device.open_rows(rows_cpu, [req.sampling for req in reqs])

    logits = torch.randn(len(reqs), VOCAB + 3, generator=generator) * 2
    positions = torch.tensor([len(req.prompt_ids) + len(req.output_ids) for req in reqs])
    drawn = device.draw(logits, rows, rows_cpu, positions)
    prompts = tuple(ReqStep(req.row, Phase.PREFILL, 0, (1,), num_logits=1) for req in reqs)
    first = decide(StepPlan(0, prompts), logits, [r.sampling for r in reqs], host, KERNELS)
    assert drawn.tolist() == [row.new_ids[0] for row in first.rows]
    device.commit(rows, drawn[:, None], torch.ones_like(drawn))
    for req, token in zip(reqs, drawn.tolist(), strict=True):
        req.output_ids.append(token)

    for draft_ids, parents in steps:
        n = len(parents[0])
        seq_lens = [len(req.prompt_ids) + len(req.output_ids) - 1 for req in reqs]
        # Half of the mass on what was drafted, so that walks are long.
        logits = torch.randn(len(reqs), n, VOCAB + 3, generator=generator) * 2
        for b, tree in enumerate(parents):
            for child in range(1, n):
                if draft_ids[b][child] < VOCAB:
                    logits[b, tree[child], draft_ids[b][child]] += 3.0
        for _ in range(num_broken):
            logits[seed % len(reqs), seed % n] = [torch.nan, torch.inf, -torch.inf][seed % 3]
        trees = trees_of(draft_ids, parents, seq_lens)
        verdict = device.verify(
            logits.flatten(0, 1), trees, rows, rows_cpu, torch.tensor(seq_lens), n - 1
        )
        plan = tuple(
            ReqStep(req.row, Phase.VERIFY, seq_lens[b], tuple(draft_ids[b]), parents=tuple(tree))
            for b, (req, tree) in enumerate(zip(reqs, parents, strict=True))
        )
        decision = decide(
            StepPlan(1, plan), logits.flatten(0, 1), [r.sampling for r in reqs], host, KERNELS
        )
        new_ids = new_ids_of(verdict)
        expected = [[*row.new_ids, *([NO_TOKEN] if row.error else [])] for row in decision.rows]
        assert new_ids == expected
        assert [ids[-1] == NO_TOKEN for ids in new_ids] == [bool(r.error) for r in decision.rows]
        width = max(map(len, new_ids))
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in new_ids])
        device.commit(rows, padded, verdict.accept_length + 1)
        for req, result in zip(reqs, decision.rows, strict=True):
            req.output_ids.extend(result.new_ids)
            if result.error:
                return
