"""Tokens of a step: single rows, chains and trees, walked by what the target chooses itself."""

import pytest
import torch

from paceline.kernels.registry import load_kernels
from paceline.worker.errors import InternalError
from paceline.worker.sampler import Sampler
from paceline.worker.step import Phase, ReqStep, RowResult, SamplingParams, SamplingRow, StepPlan
from paceline.worker.target.verify import Decision, decide

VOCAB = 100
KERNELS = load_kernels("reference", "cpu")
GREEDY = SamplingParams(seed=1, max_tokens=50, temperature=0.0)
# Tree A: node 1 (10) and 2 (20) below the root 7; 3 (11), 4 (12) below 1; 5 (21) below 2.
TREE_A = ReqStep(
    req_pool_index=0,
    phase=Phase.VERIFY,
    prefix_len=3,
    input_ids=(7, 10, 20, 11, 12, 21),
    parents=(-1, 0, 0, 1, 1, 2),
)
CHAIN_B = ReqStep(0, Phase.VERIFY, prefix_len=2, input_ids=(9, 5, 6, 7))


def sampling(params: SamplingParams = GREEDY) -> SamplingRow:
    return SamplingRow(params, [1, 2, 3], [7])


def run(*rows: tuple[ReqStep, dict[int, int]], params: SamplingParams = GREEDY) -> Decision:
    """Decides rows whose logits favour the given token at each node, and token 99 elsewhere."""
    logits = []
    for step, targets in rows:
        for node in range(len(step.input_ids)):
            row = torch.zeros(VOCAB)
            row[targets.get(node, 99)] = 5.0
            logits.append(row)
    plan = StepPlan(0, tuple(step for step, _ in rows))
    sampler = Sampler(KERNELS, VOCAB)
    return decide(plan, torch.stack(logits), [sampling(params) for _ in rows], sampler, KERNELS)


@pytest.mark.parametrize(
    ("targets", "new_ids", "path"),
    [
        pytest.param({0: 20, 2: 21, 5: 41}, (20, 21, 41), (0, 2, 5), id="deep accept"),
        pytest.param({0: 77}, (77,), (0,), id="root rejects"),
        pytest.param({0: 10, 1: 12, 4: 50}, (10, 12, 50), (0, 1, 4), id="second sibling"),
        pytest.param({0: 10, 1: 11, 3: 31}, (10, 11, 31), (0, 1, 3), id="leaf before the depth"),
        pytest.param({0: 20, 2: 11, 5: 41}, (20, 11), (0, 2), id="a cousin is no child"),
    ],
)
def test_a_tree_is_accepted_along_the_path_of_the_targets_tokens(
    targets: dict[int, int], new_ids: tuple[int, ...], path: tuple[int, ...]
) -> None:
    decision = run((TREE_A, targets))
    assert decision.rows == (RowResult(new_ids, len(new_ids) - 1, num_proposed=5),)
    assert decision.paths == (path,)


def test_each_tree_of_a_batch_is_walked_alone() -> None:
    decision = run((TREE_A, {0: 20, 2: 21, 5: 41}), (TREE_A, {0: 77}))
    assert decision.paths == ((0, 2, 5), (0,))
    assert [row.new_ids for row in decision.rows] == [(20, 21, 41), (77,)]


@pytest.mark.parametrize(
    ("targets", "new_ids"),
    [
        ([5, 6, 7, 8], (5, 6, 7, 8)),
        ([5, 6, 0, 8], (5, 6, 0)),
        ([1, 6, 7, 8], (1,)),
    ],
)
@pytest.mark.parametrize("parents", [None, (-1, 0, 1, 2)], ids=["causal", "tree"])
def test_a_chain_is_accepted_up_to_the_first_disagreement(
    targets: list[int], new_ids: tuple[int, ...], parents: tuple[int, ...] | None
) -> None:
    step = ReqStep(0, Phase.VERIFY, 2, CHAIN_B.input_ids, parents=parents)
    decision = run((step, dict(enumerate(targets))))
    assert decision.rows == (RowResult(new_ids, len(new_ids) - 1, num_proposed=3),)
    assert decision.paths == (tuple(range(len(new_ids))),)


def test_trees_of_different_sizes_share_a_step_with_single_rows() -> None:
    decode = ReqStep(0, Phase.DECODE, 4, (8,))
    prefill = ReqStep(1, Phase.PREFILL, 0, (1, 2, 3), num_logits=1)
    chunk = ReqStep(2, Phase.PREFILL, 0, (1, 2), num_logits=0)
    lone_root = ReqStep(3, Phase.VERIFY, 3, (7,), parents=(-1,))
    rows = (decode, CHAIN_B, TREE_A, lone_root, prefill, chunk)
    favoured = [31, *(5, 0, 0, 0), *(20, 0, 21, 0, 0, 41), 32, 33]
    logits = torch.nn.functional.one_hot(torch.tensor(favoured), VOCAB).float()
    decision = decide(
        StepPlan(0, rows),
        logits,
        [sampling()] * 5 + [None],
        Sampler(KERNELS, VOCAB),
        KERNELS,
    )
    assert [row.new_ids for row in decision.rows] == [
        (31,),
        (5, 0),
        (20, 21, 41),
        (32,),
        (33,),
        (),
    ]
    assert decision.paths == ((), (0, 1), (0, 2, 5), (0,), (), ())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_finite_maximum_end_behind_the_tokens_before_them(
    temperature: float,
) -> None:
    params = SamplingParams(seed=1, max_tokens=50, temperature=temperature)
    decode = ReqStep(0, Phase.DECODE, 4, (8,))
    # Row by row: a single; a tree at the root; one at node 2, which is accepted; one at node 1,
    # which is not; and a single without fault.
    rows = (decode, TREE_A, TREE_A, TREE_A, decode)
    favoured = [31, *(20, 0, 0, 0, 0, 0), *(20, 0, 21, 0, 0, 41), *(20, 0, 21, 0, 0, 41), 33]
    logits = 1000 * torch.nn.functional.one_hot(torch.tensor(favoured), VOCAB).float()
    logits[[0, 1, 9, 14]] = float("nan")
    decision = decide(
        StepPlan(0, rows), logits, [sampling(params)] * 5, Sampler(KERNELS, VOCAB), KERNELS
    )
    assert [row.new_ids for row in decision.rows] == [(), (), (20,), (20, 21, 41), (33,)]
    assert [bool(row.error) for row in decision.rows] == [True, True, True, False, False]
    assert [row.accept_length for row in decision.rows] == [0, 0, 0, 2, 0]
    assert decision.paths == ((), (), (0,), (0, 2, 5), ())
    assert "no finite maximum" in decision.rows[0].error


def test_a_step_without_logits_has_empty_results() -> None:
    chunk = ReqStep(0, Phase.PREFILL, 0, (1, 2), num_logits=0)
    decision = decide(StepPlan(0, (chunk,)), None, [None], Sampler(KERNELS, VOCAB), KERNELS)
    assert decision == Decision((RowResult(),), ((),))


def test_a_draft_id_outside_the_vocabulary_is_rejected() -> None:
    step = ReqStep(0, Phase.VERIFY, 2, (9, VOCAB + 5, 6), parents=(-1, 0, 1))
    for params in (GREEDY, SamplingParams(seed=1, max_tokens=9, frequency_penalty=0.5)):
        decision = run((step, {0: 5}), params=params)
        assert decision.rows[0].accept_length == 0


def test_penalties_count_the_tokens_of_each_path() -> None:
    """A token drafted once may not be drafted again where the penalty forbids the repeat."""
    params = SamplingParams(seed=1, max_tokens=9, temperature=0.0, frequency_penalty=2.0)
    step = ReqStep(0, Phase.VERIFY, 3, (7, 10, 10, 11), parents=(-1, 0, 1, 1))
    logits = torch.zeros(4, VOCAB)
    logits[:, 10], logits[:, 11] = 5.0, 4.0
    decision = decide(
        StepPlan(0, (step,)), logits, [sampling(params)], Sampler(KERNELS, VOCAB), KERNELS
    )
    # Root: 10 at 5. Below it 10 falls to 3 and 11 leads. Below both 10 has 3, 11 has 2.
    assert decision.rows[0].new_ids == (10, 11, 10)
    assert decision.paths[0] == (0, 1, 3)


def test_min_tokens_count_the_tokens_of_each_path() -> None:
    params = SamplingParams(seed=1, max_tokens=9, temperature=0.0, min_tokens=3)
    step = ReqStep(0, Phase.VERIFY, 3, (7, 10, 10), parents=(-1, 0, 1))
    logits = torch.zeros(3, VOCAB)
    logits[:, 2], logits[:, 10] = 5.0, 4.0
    sampler = Sampler(KERNELS, VOCAB, eos_token_ids=(2,))
    decision = decide(StepPlan(0, (step,)), logits, [sampling(params)], sampler, KERNELS)
    assert decision.rows[0].new_ids == (10, 10, 2)  # with the one before, three stand


def test_logits_that_do_not_fit_the_plan_are_an_internal_error() -> None:
    with pytest.raises(InternalError, match="3 rows of logits for a plan that wants 4"):
        decide(
            StepPlan(0, (CHAIN_B,)),
            torch.zeros(3, VOCAB),
            [sampling()],
            Sampler(KERNELS, VOCAB),
            KERNELS,
        )


def test_a_verify_row_without_logits_for_all_nodes_is_an_internal_error() -> None:
    step = ReqStep(0, Phase.VERIFY, 2, (9, 5), num_logits=1)
    with pytest.raises(InternalError, match="2 nodes"):
        decide(
            StepPlan(0, (step,)),
            torch.zeros(1, VOCAB),
            [sampling()],
            Sampler(KERNELS, VOCAB),
            KERNELS,
        )
