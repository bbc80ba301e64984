"""SyncPath: whatever the draft says the tokens are the target's; where its KV stands, who it is
for, and what is not computed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer
from paceline.worker.config import SpecConfig, SpecMethod
from paceline.worker.errors import ConfigError
from paceline.worker.models.draft_head import DraftHead
from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.spec.eagle_sync import SyncPath
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.step import Phase, SamplingParams, SpecShape, StepPlan
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.colocated import (
    GREEDY,
    SAMPLED,
    ColocatedTarget,
    config_of,
    spec_config,
)
from tests.colocated_models import ColocatedModels, make_colocated_models
from tests.tiny import make_tiny_model

METHODS: tuple[SpecMethod, ...] = ("eagle", "eagle3", "standalone")
PROMPTS = [[5, 9, 33, 77, 2, 4, 100], [7 + i for i in range(15)], [30, 31]]
PENALISED = replace(
    GREEDY,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((5, 2.0), (100, -3.0)),
)
PARAMS = (GREEDY, SAMPLED, PENALISED, replace(PENALISED, temperature=0.8, top_p=0.9))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="module")
def plain(models: ColocatedModels) -> Iterator[Executor]:
    executor = build_executor(config_of(models.target))
    yield executor
    executor.shutdown()


@contextmanager
def colocated(
    models: ColocatedModels, method: SpecMethod, *, page_size: int = 4, **spec: int
) -> Iterator[Executor]:
    config = spec_config(method, models.drafts[method], **spec)
    executor = build_executor(config_of(models.target, config, page_size=page_size))
    yield executor
    executor.shutdown()


def outputs(
    executor: Executor,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **options: int,
) -> list[list[int]]:
    target = ColocatedTarget(executor, **options)
    return target.run(target.make_reqs(prompts, params))


def path_of(executor: Executor) -> SyncPath:
    assert isinstance(executor._path, SyncPath)
    return executor._path


# ---- what is said


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(
    models: ColocatedModels, plain: Executor, method: SpecMethod, topk: int, page_size: int
) -> None:
    """Rows are used again from run to run."""
    accepted = []
    with colocated(models, method, topk=topk, page_size=page_size) as executor:
        for params in PARAMS:
            target = ColocatedTarget(executor, chunk_size=6)
            reqs = target.make_reqs(PROMPTS, params)
            assert target.run(reqs) == outputs(plain, params)
            accepted += [n for req in reqs for n in req.accept_lengths]
    # Trees were accepted in part, else moves and extends were not put to the test.
    assert min(accepted) == 0
    assert max(accepted) >= 2


def test_shapes_may_change_from_step_to_step(models: ColocatedModels, plain: Executor) -> None:
    shapes = [
        SpecShape(3, 4, 9), SpecShape(0, 1, 1), SpecShape(1, 2, 3), SpecShape(2, 1, 3),
        SpecShape(0, 1, 1), SpecShape(0, 1, 1), SpecShape(3, 1, 3), SpecShape(2, 9, 6),
    ]  # fmt: skip
    with colocated(models, "eagle3", topk=4) as executor:
        target = ColocatedTarget(executor, shapes=lambda step: shapes[step % len(shapes)])
        reqs = target.make_reqs(PROMPTS, SAMPLED)
        assert target.run(reqs) == outputs(plain, SAMPLED)
    assert sum(sum(req.accept_lengths) for req in reqs) > 0


def test_a_req_drafts_in_company_as_it_does_alone(models: ColocatedModels) -> None:
    """Reqs end and come one by one, so that rows of the state are dropped, kept and added."""
    lengths = (9, 24, 15)
    params = [replace(SAMPLED, max_tokens=n) for n in lengths]
    prompts = [*PROMPTS, [40, 41, 42, 43]]
    params.append(SAMPLED)
    with colocated(models, "eagle", topk=2) as executor:
        target = ColocatedTarget(executor)
        together = target.make_reqs(prompts, params)
        together[3].arrives = 6  # when the first is gone
        target.run(together)
        for req in target.make_reqs(prompts, params):
            target.run([req])
            twin = together[req.row - 1]
            assert req.output_ids == twin.output_ids
            assert req.accept_lengths == twin.accept_lengths


def test_one_that_ends_with_its_first_token_leaves_the_others_theirs(
    models: ColocatedModels, plain: Executor
) -> None:
    params = [replace(GREEDY, max_tokens=1), GREEDY, GREEDY]
    with colocated(models, "eagle3") as executor:
        target = ColocatedTarget(executor)
        reqs = target.make_reqs(PROMPTS, params)
        for req in reqs:
            req.arrives = 0
        assert target.run(reqs) == outputs(plain, params)
        assert all(req.accept_lengths for req in reqs[1:])


def test_a_req_ends_at_a_stop_token_inside_a_run(models: ColocatedModels, plain: Executor) -> None:
    (want,) = outputs(plain, prompts=[[30, 31]])
    params = replace(GREEDY, stop_token_ids=(want[6],))
    with colocated(models, "standalone") as executor:
        (got,) = outputs(executor, params, [[30, 31]])
    assert got == want[: want.index(want[6]) + 1]


# ---- the draft that knows


@dataclass
class Call:
    """One forward of a draft."""

    input_ids: list[int]
    positions: list[int]
    slots: list[int]
    hidden: Tensor


@dataclass
class Scripted(DraftHead):
    """Watches a draft's forwards, and speaks for it where `says` has an answer.

    says: the guess behind a position, None for a NaN, -1 to let the draft speak.
    """

    draft: DraftHead
    says: Callable[[int], int | None] = lambda position: -1
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_layers = self.draft.num_layers
        self.heads = self.draft.heads
        self.vocab_size = self.draft.vocab_size
        self.hot_token_id = self.draft.hot_token_id

    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        kv: KvBuffer,
        mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> ForwardOutput:
        self.calls.append(
            Call(
                batch.input_ids.tolist(),
                batch.positions.tolist(),
                batch.out_cache_loc.tolist(),
                hidden.clone(),
            )
        )
        out = self.draft.forward(batch, hidden, kv, mode)
        assert out.logits is not None
        chosen = batch.logit_indices
        positions = batch.positions if chosen is None else batch.positions[chosen]
        for logits, position in zip(out.logits, positions.tolist(), strict=True):
            guess = self.says(position)
            if guess is None:
                logits.fill_(torch.nan)
            elif guess >= 0:
                logits.fill_(0.0)
                logits[guess] = 9.0
        return out


def script(executor: Executor, says: Callable[[int], int | None] = lambda p: -1) -> Scripted:
    path = path_of(executor)
    scripted = Scripted(path._draft.model, says)
    path._draft = replace(path._draft, model=scripted)
    return scripted


def knows(prompt: Sequence[int], output: Sequence[int]) -> Callable[[int], int]:
    """Behind position i an EAGLE head guesses token i + 2."""
    ids = [*prompt, *output]
    return lambda position: ids[position + 2] if position + 2 < len(ids) else 0


@pytest.mark.parametrize("topk", [1, 3])
def test_a_draft_that_is_always_right_gives_num_steps_and_one_tokens_a_step(
    models: ColocatedModels, plain: Executor, topk: int
) -> None:
    prompt = PROMPTS[0]
    (want,) = outputs(plain, prompts=[prompt])
    with colocated(models, "eagle", topk=topk) as executor:
        script(executor, knows(prompt, want))
        target = ColocatedTarget(executor)
        (req,) = target.make_reqs([prompt], replace(GREEDY, max_tokens=21))
        assert target.run([req]) == [want[:21]]
    # The prompt's step gives one token.
    assert req.num_steps == 1 + 5
    assert req.accept_lengths == [3] * 5


def test_positions_and_slots_of_a_round(models: ColocatedModels, plain: Executor) -> None:
    """num_steps 2, pages of one token; of the two guesses the first is right, then none is."""
    prompt = [50, 51, 52]
    (want,) = outputs(plain, prompts=[prompt])
    wrong = (want[2] + 1) % 200
    guesses = {2: want[1], 3: wrong, 4: want[3]}
    with colocated(models, "eagle", num_steps=2, page_size=1) as executor:
        scripted = script(executor, lambda position: guesses.get(position, 0))
        target = ColocatedTarget(executor)
        (req,) = target.make_reqs([prompt], GREEDY)
        target._collect(*target._launch(0, [req]))
        slots = list(reversed(range(executor.num_pages - 9, executor.num_pages + 1)))
        (prefill,) = scripted.calls
        assert prefill.input_ids == [51, 52, want[0]]
        assert prefill.positions == [0, 1, 2]
        assert prefill.slots == slots[:3]
        target._collect(*target._launch(1, [req]))
        grown, extended = scripted.calls[1:]
        assert (grown.input_ids, grown.positions, grown.slots) == ([want[1]], [3], slots[3:4])
        assert req.output_ids == want[:3]
        assert req.accept_lengths == [1]
        assert extended.input_ids == want[1:3]
        assert extended.positions == [3, 4]
        assert extended.slots == slots[3:5]
        target._collect(*target._launch(2, [req]))
        assert scripted.calls[3].positions == [5]
        assert scripted.calls[3].input_ids == [want[3]]


def test_positions_go_on_from_the_prompt_without_a_gap(
    models: ColocatedModels, plain: Executor
) -> None:
    """Prompt of 7, num_steps 3: prompt 0..6, drafts 7 and 8, extend 7 to 10 when all is right."""
    prompt = PROMPTS[0]
    (want,) = outputs(plain, prompts=[prompt])
    with colocated(models, "eagle") as executor:
        scripted = script(executor, knows(prompt, want))
        target = ColocatedTarget(executor)
        (req,) = target.make_reqs([prompt], replace(GREEDY, max_tokens=6))
        target.run([req])
        assert [call.positions for call in scripted.calls[:4]] == [
            [0, 1, 2, 3, 4, 5, 6],
            [7],
            [8],
            [7, 8, 9, 10],
        ]


def test_an_unshifted_draft_stands_at_the_places_of_its_tokens(
    models: ColocatedModels, plain: Executor
) -> None:
    prompt = PROMPTS[0]
    (want,) = outputs(plain, prompts=[prompt])
    with colocated(models, "standalone") as executor:
        ids = [*prompt, *want]
        scripted = script(executor, lambda position: ids[position + 1])
        target = ColocatedTarget(executor)
        (req,) = target.make_reqs([prompt], replace(GREEDY, max_tokens=6))
        assert target.run([req]) == [want[:6]]
        for call in scripted.calls:
            assert call.input_ids == [ids[position] for position in call.positions]
        assert [call.positions for call in scripted.calls[:3]] == [list(range(8)), [8], [9]]


def test_a_tree_stands_in_line_and_each_level_at_one_position(
    models: ColocatedModels,
) -> None:
    with colocated(models, "eagle", topk=3, page_size=1) as executor:
        scripted = script(executor)
        target = ColocatedTarget(executor)
        (req,) = target.make_reqs([PROMPTS[0]], GREEDY)
        for step in range(2):
            target._collect(*target._launch(step, [req]))
        first, second = scripted.calls[1:3]
        assert (first.positions, second.positions) == ([7] * 3, [8] * 3)
        slots = executor._runner.req_to_token.host[req.row]
        assert first.slots + second.slots == slots[7:13].tolist()
        # Lanes of the second level go on from nodes of the first.
        assert second.hidden.shape == first.hidden.shape


# ---- what is not computed, and what is lost


@pytest.mark.parametrize("method", METHODS)
def test_prompts_in_chunks_leave_the_kv_of_prompts_at_once(
    models: ColocatedModels, method: SpecMethod
) -> None:
    prompt = list(range(40, 50))
    found = []
    for chunk_size in (4, 512):
        with colocated(models, method) as executor:
            target = ColocatedTarget(executor, chunk_size=chunk_size)
            reqs = target.make_reqs([prompt], replace(GREEDY, max_tokens=1))
            target.run(reqs)
            kv = path_of(executor)._draft.kv
            slots = torch.from_numpy(executor._runner.req_to_token.host[1, :10]).long()
            found.append(torch.stack([x[slots] for x in (*kv.k, *kv.v)]))
    assert found[0].abs().amax(-1).min() > 0  # every slot was written
    torch.testing.assert_close(found[0], found[1])


def test_nothing_is_drafted_for_a_req_that_has_ended(
    models: ColocatedModels, plain: Executor
) -> None:
    prompt = PROMPTS[0]
    (want,) = outputs(plain, prompts=[prompt])
    with colocated(models, "eagle") as executor:
        scripted = script(executor, knows(prompt, want))
        target = ColocatedTarget(executor)
        (req,) = target.make_reqs([prompt], replace(GREEDY, max_tokens=5))
        target.run([req])
        # The prompt, then two levels of a tree, whose four tokens end the req.
        assert [len(call.input_ids) for call in scripted.calls] == [7, 1, 1]


@pytest.mark.parametrize("nan_from", [0, 9])
def test_a_draft_that_computes_nan_costs_its_guesses_alone(
    models: ColocatedModels, plain: Executor, nan_from: int
) -> None:
    with colocated(models, "eagle", topk=2) as executor:
        script(executor, lambda position: None if position >= nan_from else -1)
        target = ColocatedTarget(executor)
        reqs = target.make_reqs(PROMPTS, SAMPLED)
        assert target.run(reqs) == outputs(plain, SAMPLED)
    num_proposing = sum(len(req.accept_lengths) for req in reqs)
    assert (num_proposing > 0) == (nan_from > 0)


def test_without_depth_rows_are_decoded_and_drafts_go_on_behind_them(
    models: ColocatedModels, plain: Executor
) -> None:
    prompt = PROMPTS[0]
    (want,) = outputs(plain, prompts=[prompt])
    with colocated(models, "eagle") as executor:
        scripted = script(executor, knows(prompt, want))
        target = ColocatedTarget(
            executor, shapes=lambda step: SpecShape(3, 1, 4) if step > 3 else SpecShape(0, 1, 1)
        )
        (req,) = target.make_reqs([prompt], replace(GREEDY, max_tokens=8))
        assert target.run([req]) == [want[:8]]
        assert req.accept_lengths == [3]
        assert [call.positions for call in scripted.calls[1:4]] == [[7], [8], [9]]


def decode_every_other(plan: StepPlan) -> StepPlan:
    if plan.step_id % 2:
        return plan
    rows = [
        replace(row, phase=Phase.DECODE) if row.phase is Phase.SPECULATE else row
        for row in plan.rows
    ]
    return StepPlan(plan.step_id, tuple(rows))


@pytest.mark.parametrize("method", METHODS)
def test_plain_steps_in_between_cost_no_guess(
    models: ColocatedModels, plain: Executor, method: SpecMethod
) -> None:
    with colocated(models, method, topk=2) as executor:
        target = ColocatedTarget(executor, on_plan=decode_every_other)
        reqs = target.make_reqs(PROMPTS, SAMPLED)
        assert target.run(reqs) == outputs(plain, SAMPLED)
    assert sum(sum(req.accept_lengths) for req in reqs) > 5


@pytest.mark.parametrize("method", METHODS)
def test_rows_whose_candidates_are_lost_are_decoded_once_and_draft_again(
    models: ColocatedModels, plain: Executor, method: SpecMethod
) -> None:
    with colocated(models, method) as executor:
        path = path_of(executor)

        def lose(plan: StepPlan) -> StepPlan:
            if plan.step_id == 5:
                path._state = None
            return plan

        target = ColocatedTarget(executor, on_plan=lose)
        reqs = target.make_reqs(PROMPTS, GREEDY)
        assert target.run(reqs) == outputs(plain)
        assert all(req.num_steps - 2 <= len(req.accept_lengths) < req.num_steps for req in reqs)


def test_a_req_resumed_in_another_row_goes_on_as_before(
    models: ColocatedModels, plain: Executor
) -> None:
    """Preempted, a req's prompt and output are computed anew, in chunks."""
    with colocated(models, "eagle") as executor:
        target = ColocatedTarget(executor, chunk_size=5)
        reqs = target.make_reqs(PROMPTS, replace(SAMPLED, max_tokens=9))
        target.run(reqs)
        resumed = target.make_reqs([req.all_ids for req in reversed(reqs)], SAMPLED)
        for new, old in zip(resumed, reversed(reqs), strict=True):
            new.resume(old)
            new.params = replace(old.params, max_tokens=24)
        got = target.run(resumed)
    assert got == list(reversed(outputs(plain, SAMPLED)))


# ---- drafts that do not fit


def build_error(models: ColocatedModels, spec: SpecConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        build_executor(config_of(models.target, spec))
    return str(caught.value)


def test_drafts_that_do_not_fit_are_refused(models: ColocatedModels, tmp_path: Path) -> None:
    eagle3 = models.drafts["eagle3"]
    assert "use method 'eagle3'" in build_error(models, spec_config("eagle", eagle3))
    unnamed = replace(spec_config("eagle3", eagle3), draft_model="")
    assert "needs a draft_model" in build_error(models, unnamed)
    with pytest.raises(ConfigError, match="is a draft head"):
        build_executor(config_of(models.target, spec_config("standalone", eagle3)))
    other = make_tiny_model(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<spare1>", "<spare one>"))
    assert "tokenizer" in build_error(models, spec_config("standalone", other))


def test_both_pools_come_out_of_one_budget(models: ColocatedModels) -> None:
    max_bytes = 200_000
    for spec in (None, spec_config("eagle", models.drafts["eagle"])):
        config = config_of(models.target, spec, page_size=4)
        cache = replace(config.cache, num_pages=0, max_bytes=max_bytes)
        executor = build_executor(replace(config, cache=cache))
        kv = executor._runner.kv
        token_bytes = sum(x[0].nbytes for x in (*kv.k, *kv.v))
        if spec is not None:
            draft = path_of(executor)._draft.kv
            assert draft.num_pages == kv.num_pages
            token_bytes += sum(x[0].nbytes for x in (*draft.k, *draft.v))
        page_bytes = 4 * token_bytes
        executor.shutdown()
        assert executor.num_pages + 1 == max_bytes // page_bytes
