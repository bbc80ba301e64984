"""A real draft model behind the proposer: what it guesses, what it computes, what it gives back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.worker.config import SpecConfig
from paceline.worker.draft.proposer import Proposer, build_proposer
from paceline.worker.link.base import Commit, CommitRow, SyncRow
from paceline.worker.link.local_link import LocalLink
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.step import Epoch, Phase, ReqId, SamplingParams, StepPlan
from tests.spec_harness import GREEDY, SAMPLED, SoloTarget, TargetReq, worker_config
from tests.tp import tp_executor

CHAIN = SpecConfig(method="standalone")
TREE = SpecConfig(method="standalone", num_steps=3, topk=2, num_draft_tokens=8)
WIDE_TREE = SpecConfig(method="standalone", num_steps=4, topk=4, num_draft_tokens=12)
PROMPTS = [[1, 5, 9, 44, 60, 100, 7], [1, *range(20, 50)], [3]]


@contextmanager
def proposer_of(model: Path, spec: SpecConfig = CHAIN, **changes: int) -> Iterator[Proposer]:
    proposer = build_proposer(worker_config(model, spec=spec, **changes))
    yield proposer
    proposer.check()
    proposer.shutdown()


def run(
    target_model: Path, draft_model: Path, params: SamplingParams, spec: SpecConfig, page_size: int
) -> list[TargetReq]:
    """Decodes with the draft, and checks that the tokens are those of plain decoding."""
    num_pages = 3 * -(-128 // page_size)
    config = worker_config(target_model, spec=spec, num_pages=num_pages, page_size=page_size)
    target = SoloTarget(config)
    with proposer_of(draft_model, spec, num_pages=num_pages, page_size=page_size) as proposer:
        plain = target.run(PROMPTS, params)
        reqs = target.run(PROMPTS, params, LinkDrafter(LocalLink(proposer), spec))
        assert [req.output_ids for req in reqs] == [req.output_ids for req in plain]
        held = proposer.snapshot()
        assert (held.num_owned_pages, held.num_orphaned_pages, held.req_ids) == (0, 0, ())
    target.shutdown()
    return reqs


# ---- alignment: a draft that is the target itself is always right


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_chain_of_the_targets_own_model_is_accepted_whole(
    tiny_model: Path, page_size: int, params: SamplingParams
) -> None:
    for req in run(tiny_model, tiny_model, params, CHAIN, page_size):
        *whole, last = req.accept_lengths
        assert whole == [CHAIN.num_steps] * 12
        assert last == params.max_tokens - 1 - 12 * (CHAIN.num_steps + 1) - 1
        assert req.num_plain_steps == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", [TREE, WIDE_TREE], ids=["topk 2", "topk 4"])
def test_a_tree_of_the_targets_own_model_is_accepted_nearly_whole(
    tiny_model: Path, spec: SpecConfig, params: SamplingParams
) -> None:
    """Not quite: the best path by product of probabilities may lead past the likeliest tokens."""
    for req in run(tiny_model, tiny_model, params, spec, 4):
        whole = req.accept_lengths[:-2]
        assert sum(whole) >= 0.95 * spec.num_steps * len(whole)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_poor_draft_changes_no_token(
    tiny_model: Path, tiny_draft: Path, spec: SpecConfig, params: SamplingParams
) -> None:
    run(tiny_model, tiny_draft, params, spec, 4)


# ---- single rounds


def sync(req_id: str, ids: list[int], temperature: float = 0.0) -> SyncRow:
    return SyncRow(ReqId(req_id), tuple(ids), 7, temperature, 0, 1.0, 0.0)


def row(req_id: str, base_len: int, ids: tuple[int, ...] = (), num: int = 5) -> CommitRow:
    return CommitRow(ReqId(req_id), base_len, ids, 0, num)


def commit(number: int, *parts: SyncRow | CommitRow, epoch: int = 1) -> Commit:
    return Commit(
        Epoch(epoch),
        number,
        tuple(part for part in parts if isinstance(part, SyncRow)),
        tuple(part for part in parts if isinstance(part, CommitRow)),
    )


def record_plans(proposer: Proposer) -> list[StepPlan]:
    plans: list[StepPlan] = []
    forward = proposer.executor.forward

    def recorded(plan: StepPlan) -> torch.Tensor | None:
        plans.append(plan)
        return forward(plan)

    proposer.executor.forward = recorded  # type: ignore[method-assign]  # a spy
    return plans


def test_a_round_is_one_catch_up_and_a_forward_for_each_further_level(tiny_model: Path) -> None:
    with proposer_of(tiny_model) as proposer:
        plans = record_plans(proposer)
        first = proposer.answer_one(
            "t", commit(1, sync("a", [1, 2, 3]), sync("b", [4]), row("a", 3), row("b", 1))
        )
        assert [len(plan.rows) for plan in plans] == [2, 2, 2, 2]
        assert [r.phase for r in plans[0].rows] == [Phase.DECODE, Phase.PREFILL]
        guesses = first.rows[0].tree.token_ids
        assert len(guesses) == CHAIN.num_steps
        plans.clear()
        # All four accepted: three have KV from growth, the fourth and the bonus have not.
        proposer.answer_one("t", commit(2, row("a", 3, (*guesses, 9))))
        assert plans[0].rows[0].input_ids == (guesses[-1], 9)
        plans.clear()
        # One accepted: only the bonus is new.
        guesses = proposer.answer_one("t", commit(3, row("a", 8))).rows[0].tree.token_ids
        plans.clear()
        proposer.answer_one("t", commit(4, row("a", 8, (guesses[0], (guesses[1] + 1) % 264))))
        assert len(plans[0].rows[0].input_ids) == 1


def test_a_repeated_round_has_the_same_answer_and_an_old_one_none(tiny_model: Path) -> None:
    with proposer_of(tiny_model) as proposer:
        question = commit(5, sync("a", [1, 2, 3], 0.8), row("a", 3))
        first = proposer.answer_one("t", question)
        assert first.rows[0].tree.num_nodes == 5
        again = proposer.answer_one("t", question)
        assert replace(again, draft_us=0) == replace(first, draft_us=0)
        assert proposer.answer_one("t", commit(4, row("a", 3, (8,)))).rows == ()
        later = proposer.answer_one("t", commit(6, row("a", 3)))
        assert later.rows == first.rows


def test_rows_get_as_many_nodes_as_they_ask_for(tiny_model: Path) -> None:
    for spec in (CHAIN, TREE):
        with proposer_of(tiny_model, spec) as proposer:
            names = "abcd"
            answer = proposer.answer_one(
                "t",
                commit(
                    1,
                    *(sync(name, [3, 4]) for name in names),
                    *(row(name, 2, num=num) for num, name in enumerate(names)),
                ),
            )
            assert [r.tree.num_nodes for r in answer.rows] == [1, 1, 2, 3]


def test_unknown_and_gapped_rows_need_a_sync(tiny_model: Path) -> None:
    with proposer_of(tiny_model) as proposer:
        answer = proposer.answer_one(
            "t", commit(1, sync("a", [1, 2]), row("a", 5, (9,)), row("b", 2), row("a", 2))
        )
        assert set(answer.needs_sync) == {"a", "b"}
        assert answer.rows == ()


def test_targets_do_not_see_each_others_reqs(tiny_model: Path) -> None:
    with proposer_of(tiny_model) as proposer:
        proposer.answer_one("t", commit(1, sync("a", [1, 2]), row("a", 2)))
        assert proposer.answer_one("u", commit(1, row("a", 2))).needs_sync == ("a",)
        proposer.answer_one("u", commit(2, sync("a", [5]), row("a", 1)))
        proposer.close_target("t")
        assert proposer.snapshot().req_ids == ("a",)
        assert proposer.answer_one("t", commit(1, row("a", 2))).needs_sync == ("a",)


def test_a_long_prompt_is_computed_over_rounds_and_holds_nobody_up(tiny_model: Path) -> None:
    with proposer_of(tiny_model, chunked_prefill_size=8) as proposer:
        plans = record_plans(proposer)
        ids = list(range(3, 33))
        answer = proposer.answer_one(
            "t", commit(1, sync("long", ids), sync("short", [3]), row("long", 30), row("short", 1))
        )
        sizes = [answer.rows[0].tree.num_nodes]
        assert answer.rows[1].tree.num_nodes == 5
        for number in range(2, 6):
            answer = proposer.answer_one("t", commit(number, row("long", 30)))
            sizes.append(answer.rows[0].tree.num_nodes)
        assert sizes == [1, 1, 1, 5, 5]
        assert max(sum(len(r.input_ids) for r in plan.rows) for plan in plans) == 8
        with proposer_of(tiny_model) as whole:
            at_once = whole.answer_one("t", commit(1, sync("long", ids), row("long", 30)))
        assert answer.rows == at_once.rows


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_growth_ends_at_the_drafts_own_context(tiny_model: Path, spec: SpecConfig) -> None:
    with proposer_of(tiny_model, spec, max_model_len=16) as proposer:
        depths = []
        for number, length in enumerate((10, 14, 15, 16, 17, 40)):
            ids = [3 + i % 50 for i in range(length)]
            answer = proposer.answer_one("t", commit(number, sync("a", ids), row("a", length)))
            depths.append(max(answer.rows[0].tree.depths(), default=0))
        assert depths == [spec.num_steps, min(3, spec.num_steps), 2, 1, 0, 0]


def test_a_req_that_lost_its_pages_is_computed_again_not_synced_again(tiny_model: Path) -> None:
    with proposer_of(tiny_model, num_pages=32, max_num_seqs=1) as proposer:
        question = [sync("a", [1, 2, 3]), row("a", 3)]
        first = proposer.answer_one("t", commit(1, *question))
        proposer.answer_one("t", commit(2, sync("b", [9, 8]), row("b", 2)))
        again = proposer.answer_one("t", commit(3, row("a", 3)))
        assert again.needs_sync == ()
        assert again.rows == first.rows


def test_a_second_req_finds_the_prefix_of_the_first(tiny_model: Path) -> None:
    with proposer_of(tiny_model) as proposer:
        plans = record_plans(proposer)
        ids = list(range(3, 33))
        first = proposer.answer_one("t", commit(1, sync("a", ids), row("a", 30)))
        plans.clear()
        second = proposer.answer_one("t", commit(2, sync("b", ids), row("b", 30)))
        assert plans[0].rows[0].prefix_len == 28
        assert second.rows[0].tree == first.rows[0].tree


def test_a_draft_that_computes_nonsense_guesses_nothing(tiny_model: Path) -> None:
    for spec in (CHAIN, TREE):
        with proposer_of(tiny_model, spec) as proposer:
            forward = proposer.executor.forward

            def nonsense(plan: StepPlan, forward=forward) -> torch.Tensor:  # type: ignore[no-untyped-def]  # bound now
                return torch.full_like(forward(plan), torch.nan)

            proposer.executor.forward = nonsense  # type: ignore[method-assign]  # a faulty device
            answer = proposer.answer_one("t", commit(1, sync("a", [1, 2]), row("a", 2)))
            assert answer.rows[0].tree.num_nodes == 1


def test_a_lost_device_takes_a_local_link_down_and_raises_nothing(tiny_model: Path) -> None:
    with proposer_of(tiny_model) as proposer:
        link = LocalLink(proposer)

        def fail(plan: StepPlan) -> torch.Tensor:
            raise RuntimeError("the device is on fire")

        proposer.executor.forward = fail  # type: ignore[method-assign]  # a faulty device
        assert link.exchange(commit(1, sync("a", [1, 2]), row("a", 2)), 1.0) is None
        assert not link.is_up
        link.close_reqs([ReqId("a")])


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_two_ranks_draft_what_one_does(tiny_draft: Path, spec: SpecConfig) -> None:
    config = worker_config(tiny_draft, spec=spec)
    questions = [
        commit(1, sync("a", [1, 2, 3], 0.8), sync("b", [9]), row("a", 3), row("b", 1)),
        commit(2, row("a", 3, (4, 5)), row("b", 1, (7,))),
    ]
    with proposer_of(tiny_draft, spec) as alone:
        expected = [alone.answer_one("t", question).rows for question in questions]
    with tp_executor(config, 2) as executor:
        proposer = Proposer(executor, spec, config.cache, 128, 8, sampler=executor.sampler)
        assert [proposer.answer_one("t", question).rows for question in questions] == expected
