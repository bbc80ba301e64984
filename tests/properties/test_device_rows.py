"""Tokens from rows on the device are those from the reqs' own lists, whatever the trees."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kernels.registry import load_kernels
from paceline.worker.config import SpecConfig, VerifyRule
from paceline.worker.sampler import NO_TOKEN, LogitRow, Sampler
from paceline.worker.step import Phase, ReqStep, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.device_rows import DeviceSampler, Verdict
from paceline.worker.target.verify import decide
from tests.three_ways import Case, trees_of, verify

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
        trees = trees_of(
            [Case(r.sampling, *tree) for r, *tree in zip(reqs, draft_ids, parents, strict=True)]
        )
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


# ---- drafts


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    num_hot=st.sampled_from([0, 12, 25]),
)
def test_children_are_ranked_alike_on_host_and_device(
    params: list[SamplingParams], seed: int, num_hot: int, rule: VerifyRule
) -> None:
    spec = SpecConfig(rule=rule)
    generator = torch.Generator().manual_seed(seed)
    hot = torch.randperm(VOCAB, generator=generator)[:num_hot].sort().values if num_hot else None
    rows_cpu = list(range(1, len(params) + 1))
    rows_cpu += rows_cpu[:1]  # two lanes of one req
    logits = torch.randn(len(rows_cpu), num_hot or VOCAB + 3, generator=generator) * 2
    logits[0, 3:8] = -torch.inf
    positions = torch.tensor([5 + row for row in rows_cpu])
    host = Sampler(KERNELS, VOCAB, (EOS,), spec)
    logit_rows = [LogitRow(params[row - 1], range(5 + row), ()) for row in rows_cpu]
    probs, ids = host.top_children(logits, logit_rows, 4, hot)
    for is_dense in (True, False):
        device = device_sampler(spec, is_dense=is_dense)
        device.open_rows(rows_cpu[:-1], [SamplingRow(p, [1], []) for p in params])
        told = device.top_children(logits, torch.tensor(rows_cpu), rows_cpu, positions, 4, hot)
        assert torch.equal(told[1], ids)
        assert torch.equal(told[0] > 0, probs > 0)
        assert (told[0][:, :-1] >= told[0][:, 1:]).all()


@settings(max_examples=60, deadline=None)
@given(params=PARAMS, seed=st.integers(0, 2**31), position=st.integers(1, 99))
def test_a_smaller_vocabulary_meets_the_noise_of_the_targets_tokens(
    params: SamplingParams, seed: int, position: int
) -> None:
    """A target that wants none but hot tokens, and a draft that knows its logits of those."""
    generator = torch.Generator().manual_seed(seed)
    hot = torch.randperm(VOCAB, generator=generator)[:15]
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, hot] = torch.randn(15, generator=generator) * 2
    plain = SamplingParams(params.seed, 9, params.temperature, params.top_p, params.top_k)
    row = LogitRow(plain, range(position), ())
    host = Sampler(KERNELS, VOCAB)
    wanted = int(host.choose(logits, [row]))
    _, ids = host.top_children(logits[:, hot], [row], 1, hot)
    assert int(hot[ids[0, 0]]) == wanted


def test_by_rejection_children_rank_by_their_probability_not_by_the_noise() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    row = LogitRow(SamplingParams(seed=3, max_tokens=9, temperature=0.8), range(6), ())
    probs, ids = Sampler(KERNELS, VOCAB, (), SpecConfig(rule="rejection")).top_children(
        logits, [row], 4
    )
    expected = (logits / 0.8).softmax(-1).topk(4)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(probs, expected.values)
    assert not torch.equal(Sampler(KERNELS, VOCAB).top_children(logits, [row], 4)[1], ids)


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_nothing_waits_for_a_gpu_and_its_tokens_are_those_of_the_host(rule: VerifyRule) -> None:
    """Every kind of req in one batch, under a mode in which a wait for the device is an error."""
    device, vocab_size, n = torch.device("cuda"), 5_000, 6
    spec, kernels = SpecConfig(rule=rule), load_kernels("triton", "cuda")
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 0.7, "min_tokens": 4, "logit_bias": ((5, 2.0),)},
        {"temperature": 0.0, "presence_penalty": 0.5},
    ]
    cases = [
        Case(
            SamplingRow(
                SamplingParams(seed=i, max_tokens=9, **kw),  # type: ignore[arg-type]
                [1, 2, 3],
                [7],
                wants_logprobs=i == 1,
            ),
            (7, 10, 20, 11, 12, 21),
            (-1, 0, 0, 1, 1, 2),
        )
        for i, kw in enumerate(kinds)
    ]
    bs = len(cases)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(bs, n, vocab_size, generator=generator) * 2
    for child, parent in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 2)):
        logits[:, parent, cases[0].draft_ids[child]] += 8.0
    logits[3, 0, 9] = float("nan")
    logits[4, 1] = float("nan")
    flat = logits.flatten(0, 1)
    mask = torch.full((bs * n, (vocab_size + 31) // 32), -1, dtype=torch.int32)
    expected = verify(
        "plan", cases, flat, vocab_size=vocab_size, eos_token_ids=(EOS,), spec=spec, mask=mask
    )

    sampler = DeviceSampler(kernels, vocab_size, (EOS,), bs + 1, device, spec)
    rows_cpu = list(range(1, bs + 1))
    on_gpu = [x.to(device) for x in (torch.tensor(rows_cpu), flat, mask)]
    rows, logits, mask = on_gpu
    trees = trees_of(cases, "cuda")
    seq_lens = torch.tensor([case.seq_len for case in cases], device=device)
    sampling = [case.sampling for case in cases]
    for is_watched in (False, True):  # the first time compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
        try:
            sampler.open_rows(rows_cpu, sampling)
            drawn = sampler.draw(logits[:bs], rows, rows_cpu, seq_lens + 1, mask[:bs])
            verdict = sampler.verify(logits, trees, rows, rows_cpu, seq_lens, n - 1, mask)
            tokens = verdict.predict[verdict.accept_index.clamp(min=0)]
            sampler.commit(rows, tokens, verdict.accept_length + 1)
            sampler.commit(rows, drawn[:, None], torch.ones_like(drawn))
            sampler.top_children(logits[:bs], rows, rows_cpu, seq_lens + 1, 4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    got = [
        [int(verdict.predict[i]) for i in row if i >= 0] for row in verdict.accept_index.tolist()
    ]
    assert got == [outcome.new_ids for outcome in expected]
