"""What a verify must honour, however it is executed: each case three ways, with one outcome."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.worker.config import SpecConfig
from paceline.worker.logit_stages import NodeRows
from paceline.worker.sampler import NO_TOKEN, Sampler
from paceline.worker.step import Phase, ReqStep, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.device_rows import DeviceSampler
from paceline.worker.target.verify import decide
from tests.three_ways import REFERENCE, WAYS, Case, Outcome, verify

VOCAB, EOS = 100, 2
REJECTION = SpecConfig(rule="rejection")
TREE_A = ((7, 10, 20, 11, 12, 21), (-1, 0, 0, 1, 1, 2))

pytestmark = pytest.mark.parametrize("way", WAYS)


def req(output_ids: tuple[int, ...] = (7,), **kw: Any) -> SamplingRow:
    params = SamplingParams(**({"seed": 1, "max_tokens": 50, "temperature": 0.0} | kw))
    return SamplingRow(params, [1, 3], list(output_ids))


def tree_a(sampling: SamplingRow) -> Case:
    return Case(sampling, *TREE_A)


def favour(*favoured: int, strength: float = 5.0) -> Tensor:
    return strength * torch.nn.functional.one_hot(torch.tensor(favoured), VOCAB).float()


def run(way: str, cases: list[Case], logits: Tensor, **kw: Any) -> list[Outcome]:
    return verify(way, cases, logits, vocab_size=VOCAB, eos_token_ids=(EOS,), **kw)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_greedy_req_in_a_sampled_batch_yields_the_argmax(way: str, rule: Any) -> None:
    logits = favour(20, 9, 21, 9, 9, 41, strength=2.0)
    spec = SpecConfig(rule=rule)
    cases = [tree_a(req(temperature=1.5, seed=seed)) for seed in range(12)]
    greedy, *sampled = run(way, [tree_a(req()), *cases], logits.repeat(13, 1), spec=spec)
    assert (greedy.new_ids, greedy.path) == ([20, 21, 41], [0, 2, 5])
    assert len({tuple(outcome.new_ids) for outcome in sampled}) > 3
    # And nobody's tokens depend on who shares the batch.
    assert [run(way, [case], logits, spec=spec)[0] for case in cases] == sampled


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_masked_token_is_never_emitted_whatever_the_thresholds(
    way: str, thresholds: tuple[float, float], temperature: float
) -> None:
    """All mass is on 20 and 21, and the mask forbids them both, drafted or not."""
    logits = favour(20, 20, 21, 20, 20, 21, strength=30.0)
    allowed = [t for t in range(VOCAB) if t not in (20, 21)]
    words = torch.zeros(4, dtype=torch.int64)
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    mask = words.to(torch.int32).expand(6, 4)
    single, acc = thresholds
    lossy = SpecConfig(rule="rejection", threshold_single=single, threshold_acc=acc)
    for spec in (lossy, SpecConfig()):
        for seed in range(8):
            (outcome,) = run(
                way, [tree_a(req(temperature=temperature, seed=seed))], logits, spec=spec, mask=mask
            )
            assert not {20, 21} & set(outcome.new_ids)
    # One token alone is allowed behind each node: it is drafted, so the whole path is accepted.
    one_token = torch.zeros(6, 4, dtype=torch.int32)
    for node, token in enumerate((10, 12, 0, 0, 50, 0)):
        one_token[node, token // 32] = 1 << (token % 32)
    for spec in (REJECTION, SpecConfig()):
        (outcome,) = run(
            way, [tree_a(req(temperature=temperature))], logits, spec=spec, mask=one_token
        )
        assert (outcome.new_ids, outcome.path) == ([10, 12, 50], [0, 1, 4])


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_whose_mask_allows_nothing_has_no_token_and_the_tokens_before_it_stand(
    way: str, temperature: float, rule: Any
) -> None:
    mask = torch.full((6, 4), -1, dtype=torch.int32)
    mask[2] = 0
    (outcome,) = run(
        way,
        [tree_a(req(temperature=temperature))],
        favour(20, 0, 21, 0, 0, 41, strength=60.0),
        spec=SpecConfig(rule=rule),
        mask=mask,
    )
    assert outcome.new_ids == [20, NO_TOKEN]


def test_a_bias_and_a_penalty_add_up_behind_every_node(way: str) -> None:
    """Frequency penalty .5 on token 1, emitted once; bias -100 on token 2."""
    logits = torch.full((2, VOCAB), -50.0)
    logits[0, :4] = torch.tensor([1.0, 2.0, 3.0, 0.0])
    logits[1, :4] = torch.tensor([0.0, 1.0, 0.0, 4.0])
    # Behind the root 1 has 1.5 and 2 has -97; behind node 1, where 1 stands twice, 3 leads.
    sampling = req((1,), frequency_penalty=0.5, logit_bias=((2, -100.0),))
    sampling = replace(sampling, wants_logprobs=True)
    (outcome,) = run(way, [Case(sampling, (1, 1), (-1, 0))], logits)
    assert outcome.new_ids == [1, 3]
    root = torch.full((VOCAB,), -50.0)
    root[:4] = torch.tensor([1.0, 1.5, -97.0, 0.0])
    node = torch.full((VOCAB,), -50.0)
    node[:4] = torch.tensor([0.0, 0.0, -100.0, 4.0])
    expected = [float(root.log_softmax(0)[1]), float(node.log_softmax(0)[3])]
    assert outcome.logprobs == pytest.approx(expected, abs=1e-5)


def test_all_tokens_of_a_run_count_at_the_next_step(way: str) -> None:
    """Emitted x, y, x in one step, then: x has been counted twice, y once."""
    x, y, z = 10, 11, 12
    sampling = req((7,), frequency_penalty=2.0)
    sampler = DeviceSampler(
        REFERENCE, VOCAB, (), 2, torch.device("cpu"), SpecConfig(), is_dense=way == "dense rows"
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, x], logits[0, y], logits[0, z] = 7.5, 6.5, 4.0  # 3.5, 4.5 and 4 behind x, y, x
    rows, rows_cpu = torch.tensor([1]), [1]
    if way == "plan":
        after = replace(sampling, output_ids=[7, x, y, x])
        plan = StepPlan(0, (ReqStep(1, Phase.DECODE, 5, (x,)),))
        (row,) = decide(plan, logits, [after], Sampler(REFERENCE, VOCAB), REFERENCE).rows
        assert row.new_ids == (y,)
        return
    sampler.open_rows([1], [sampling])
    assert sampler.draw(logits, rows, rows_cpu, torch.tensor([3])).tolist() == [x]
    sampler.commit(rows, torch.tensor([[x, y, x, z]]), torch.tensor([3]))
    assert sampler.draw(logits, rows, rows_cpu, torch.tensor([6])).tolist() == [y]
    # Another req on the row starts from its own text.
    sampler.open_rows([1], [sampling])
    assert sampler.draw(logits, rows, rows_cpu, torch.tensor([3])).tolist() == [x]


def test_eos_is_impossible_before_min_tokens_however_long_the_runs(way: str) -> None:
    """Runs of three with min_tokens 5: two steps of three tokens, and EOS is the sixth."""
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS], logits[:, 10] = 5.0, 4.0
    emitted: list[int] = [7]
    runs = []
    for _ in range(2):
        case = Case(req(tuple(emitted), min_tokens=5), (emitted[-1], 10, 10), (-1, 0, 1))
        (outcome,) = run(way, [case], logits)
        runs.append(outcome.new_ids)
        emitted += outcome.new_ids
    assert runs == [[10, 10, 10], [10, EOS]]


def test_a_processor_sees_all_rows_of_its_req_at_once_and_no_others(way: str) -> None:
    seen: list[tuple[int, list[tuple[int, ...]]]] = []

    def forbid_20(logits: Tensor, nodes: NodeRows) -> Tensor:
        seen.append((len(logits), nodes.path_ids()))
        assert logits.shape[1] == VOCAB
        logits[:, 20] = -torch.inf
        return logits

    def favour_what_was_drafted(logits: Tensor, nodes: NodeRows) -> Tensor:
        for row, path in zip(logits, nodes.path_ids(), strict=True):
            row[12 if path == (10,) else 10] = 4.0
        return logits

    logits = favour(*(20, 0, 21, 0, 0, 41) * 2)
    marked = replace(req(), processors=(forbid_20, favour_what_was_drafted))
    plain, processed = run(way, [tree_a(req()), tree_a(marked)], logits)
    assert plain.new_ids == [20, 21, 41]
    assert processed.new_ids == [10, 0]  # 0 at 5 leads behind node 1; 12 has 4 there
    assert seen == [(6, [(), (10,), (20,), (10, 11), (10, 12), (20, 21)])]
    assert torch.equal(logits, favour(*(20, 0, 21, 0, 0, 41) * 2))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_each_new_token_has_the_log_probability_of_its_parents_row(way: str, rule: Any) -> None:
    """Nodes [0, 2, 5] of the first req and [6] of the second, six nodes each."""
    logits = favour(20, 9, 21, 9, 9, 41, *(77, 9, 9, 9, 9, 9), strength=40.0)
    logits += torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(3))
    greedy = replace(req(), wants_logprobs=True)
    sampled = replace(req(temperature=0.5, top_k=3), wants_logprobs=True)
    cases = [tree_a(greedy), tree_a(sampled), tree_a(req())]
    outcomes = run(way, cases, torch.cat((logits, logits[:6])), spec=SpecConfig(rule=rule))
    assert [o.path for o in outcomes] == [[0, 2, 5], [0], [0, 2, 5]]
    expected = [float(logits[i].log_softmax(0)[t]) for i, t in ((0, 20), (2, 21), (5, 41))]
    assert outcomes[0].logprobs == pytest.approx(expected, abs=1e-4)
    expected = [float((logits[6] / 0.5).log_softmax(0)[77])]
    assert outcomes[1].logprobs == pytest.approx(expected, abs=1e-4)
    assert outcomes[2].logprobs == []


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("token", [VOCAB, VOCAB + 5, NO_TOKEN])
def test_a_draft_id_outside_the_vocabulary_is_rejected(
    way: str, temperature: float, token: int, rule: Any
) -> None:
    """Also -1, which stands for the target's token where it has none, as behind node 0 here."""
    sampling = req(temperature=temperature, frequency_penalty=0.1)
    logits = favour(5, 6, 6, strength=40.0)
    (outcome,) = run(
        way, [Case(sampling, (9, token, 6), (-1, 0, 1))], logits, spec=SpecConfig(rule=rule)
    )
    assert outcome.new_ids == [5]
    logits[0] = float("nan")
    (outcome,) = run(
        way, [Case(sampling, (9, token, 6), (-1, 0, 1))], logits, spec=SpecConfig(rule=rule)
    )
    assert outcome.new_ids == [NO_TOKEN]


def test_simulated_steps_yield_as_many_real_ids_as_asked(way: str) -> None:
    spec = SpecConfig(num_steps=5, simulated_accept_length=3.0)
    cases = [tree_a(req()), tree_a(req(temperature=0.8))]
    logits = favour(*(77, 9, 9, 9, 9, 9) * 2, strength=40.0)
    for outcome in run(way, cases, logits, spec=spec):
        assert outcome.path == [0, 1, 2]
        assert outcome.new_ids == [10, 20, 77]  # two drafts, then what the target chose
    # A tree of fewer nodes gives what it has; one whose root has no token ends there.
    (short,) = run(way, [Case(req(), (7, 10), (-1, 0))], favour(77, 0), spec=spec)
    assert short.new_ids == [10, 77]
    broken = logits[:6].clone()
    broken[0] = float("nan")
    (lost,) = run(way, cases[:1], broken, spec=spec)
    assert lost.new_ids == [10, 20, NO_TOKEN]
