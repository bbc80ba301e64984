"""Steps launched a step ahead: the tokens, the KV and the rows are those of plain decoding."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.worker.batch import build_batch
from paceline.worker.config import KernelSetName, SpecConfig, SpecMethod, VerifyRule, WorkerConfig
from paceline.worker.spec.eagle_overlap import OverlapPath
from paceline.worker.step import (
    Phase,
    ReqStep,
    SamplingParams,
    SpecShape,
    StepPlan,
)
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.colocated import (
    GREEDY,
    SAMPLED,
    ColocatedReq,
    ColocatedTarget,
    config_of,
    default_shape,
    spec_config,
)
from tests.colocated_models import ColocatedModels, make_colocated_models
from tests.loop_group import LoopGroup
from tests.tp import tp_executor

METHODS: tuple[SpecMethod, ...] = ("eagle", "eagle3", "standalone")
PROMPTS = [[5 + (i * 11) % 240 for i in range(n)] for n in (1, 7, 16, 19)]
CHUNK_SIZE = 8
LONG_PARAMS = [replace(params, max_tokens=48) for params in (GREEDY, SAMPLED)]
TEXTS = [*PROMPTS, PROMPTS[3][:17]]  # two begin alike
SHORT_OF_PAGES = 40  # of 4 tokens, for texts that want twice as many
ADJUSTED = {
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
    "repetition_penalty": 1.3,
    "min_tokens": 9,
    "ignore_eos": False,
    "logit_bias": ((77, 3.0), (120, -100.0)),
}
PARAMS = [
    GREEDY,
    SAMPLED,
    replace(GREEDY, **ADJUSTED),  # type: ignore[arg-type]  # fields of SamplingParams
    replace(SAMPLED, **ADJUSTED),  # type: ignore[arg-type]  # fields of SamplingParams
]
# They end in different steps, so that some go on in vain beside others that do not.
ENDS = [24, 5, 17, 11]

Run = Callable[..., list[ColocatedReq]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


@pytest.fixture(scope="module")
def executors() -> Iterator[Callable[[WorkerConfig], Executor]]:
    """One for each config; their pages keep what earlier tests wrote."""
    built: dict[WorkerConfig, Executor] = {}

    def get(config: WorkerConfig) -> Executor:
        if config not in built:
            built[config] = build_executor(config)
        return built[config]

    yield get
    for executor in built.values():
        executor.shutdown()


@pytest.fixture(scope="module")
def say(
    models: ColocatedModels, executors: Callable[[WorkerConfig], Executor]
) -> Callable[[Sequence[SamplingParams]], list[list[int]]]:
    """What the target says, decoded plainly."""
    known: dict[tuple[SamplingParams, ...], list[list[int]]] = {}

    def get(params: Sequence[SamplingParams]) -> list[list[int]]:
        if tuple(params) not in known:
            target = ColocatedTarget(executors(config_of(models.target)))
            known[tuple(params)] = target.run(target.make_reqs(PROMPTS, params))
        return known[tuple(params)]

    return get


def ending(params: SamplingParams) -> list[SamplingParams]:
    return [replace(params, max_tokens=max_tokens) for max_tokens in ENDS]


def overlapped(models: ColocatedModels, method: SpecMethod, **options: int) -> SpecConfig:
    return spec_config(method, models.drafts[method], **options, overlap="on")


def path_of(executor: Executor) -> OverlapPath:
    path = executor._path
    assert isinstance(path, OverlapPath)
    return path


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "greedy-adj", "sampled-adj"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_plain_decoding(
    models: ColocatedModels,
    executors: Callable[[WorkerConfig], Executor],
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
    method: SpecMethod,
    topk: int,
    page_size: int,
    params: SamplingParams,
) -> None:
    spec = overlapped(models, method, topk=topk)
    executor = executors(config_of(models.target, spec, page_size=page_size))
    assert executor.is_overlapped
    target = ColocatedTarget(executor, chunk_size=CHUNK_SIZE)
    reqs = target.make_reqs(PROMPTS, ending(params))
    assert target.run(reqs) == say(ending(params))
    lens = [accept_length for req in reqs for accept_length in req.accept_lengths]
    assert 0 < sum(lens) < spec.num_steps * len(lens), "trees are accepted in part"


@pytest.mark.parametrize(
    ("method", "topk"),
    # Not a standalone chain: at the edge of the slots it owns, which differ, it rests for a step.
    [("eagle", 1), ("eagle", 4), ("eagle3", 1), ("eagle3", 4), ("standalone", 4)],
)
def test_drafts_are_those_of_the_path_that_waits(
    models: ColocatedModels,
    executors: Callable[[WorkerConfig], Executor],
    method: SpecMethod,
    topk: int,
) -> None:
    """So the draft's KV and state are the same, whichever path wrote them."""
    spec = overlapped(models, method, topk=topk)
    runs = []
    for overlap in ("on", "off"):
        config = config_of(models.target, replace(spec, overlap=overlap), page_size=16)
        target = ColocatedTarget(executors(config), chunk_size=CHUNK_SIZE)
        reqs = target.make_reqs(PROMPTS, GREEDY)
        target.run(reqs)
        runs.append([(req.output_ids, req.accept_lengths) for req in reqs])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", METHODS)
def test_kv_is_left_in_line_as_a_prompt_would_leave_it(
    models: ColocatedModels, executors: Callable[[WorkerConfig], Executor], method: SpecMethod
) -> None:
    """Of both models, whatever branches were accepted and whatever was written and refused."""
    executor = executors(config_of(models.target, overlapped(models, method, topk=4)))
    target = ColocatedTarget(executor, chunk_size=CHUNK_SIZE)
    (req, *_) = reqs = target.make_reqs(PROMPTS[3:], replace(GREEDY, max_tokens=24))
    target.run(reqs)
    assert any(req.accept_lengths)
    path = path_of(executor)
    table = path._runner.req_to_token
    text = [*req.prompt_ids, *req.output_ids]
    num_known = len(text) - 1  # tokens that have KV, and whose next one is known
    slots = torch.from_numpy(table.host[req.row, :num_known].copy()).long()
    caches = (path._runner.kv, path._draft.kv)
    left = [[x[slots].clone() for x in (*kv.k, *kv.v)] for kv in caches]

    prompt = ReqStep(req.row, Phase.PREFILL, 0, tuple(text[:num_known]), num_logits=0)
    with torch.inference_mode():
        batch = build_batch(StepPlan(0, (prompt,)), table, executor.kernels)
        out = path._runner.forward(batch, path._draft.capture)
        shift = path._draft.token_shift
        read = replace(prompt, input_ids=tuple(text[shift : num_known + shift]))
        batch = build_batch(StepPlan(0, (read,)), table, executor.kernels)
        path._draft.model.forward(
            batch, path._round.features(out.hidden, num_known), path._draft.kv
        )
    for kv, was in zip(caches, left, strict=True):
        for x, y in zip((*kv.k, *kv.v), was, strict=True):
            torch.testing.assert_close(x[slots], y, atol=2e-4, rtol=2e-4)


def test_shapes_may_change_from_step_to_step(
    models: ColocatedModels,
    executors: Callable[[WorkerConfig], Executor],
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
) -> None:
    spec = overlapped(models, "eagle3", topk=4)
    shapes = [
        default_shape(spec),
        SpecShape(0, 4, 1),
        SpecShape(1, 4, 3),
        SpecShape(2, 1, 3),
        SpecShape(3, 2, 2),
        SpecShape(0, 1, 1),
        SpecShape(3, 4, 11),
    ]
    executor = executors(config_of(models.target, spec, page_size=16))
    target = ColocatedTarget(executor, shapes=lambda step: shapes[step % len(shapes)])
    reqs = target.make_reqs(PROMPTS, SAMPLED)
    assert target.run(reqs) == say([SAMPLED] * len(PROMPTS))
    assert sum(req.num_steps for req in reqs) < sum(len(req.output_ids) for req in reqs)


def test_a_row_is_its_next_reqs_alone(
    models: ColocatedModels,
    executors: Callable[[WorkerConfig], Executor],
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
) -> None:
    """Counts, parameters and candidates of a finished req are gone with it."""
    executor = executors(config_of(models.target, overlapped(models, "eagle", topk=1)))
    target = ColocatedTarget(executor, chunk_size=CHUNK_SIZE)
    for params in (PARAMS[3], GREEDY, PARAMS[2], SAMPLED):
        assert target.run(target.make_reqs(PROMPTS, params)) == say([params] * len(PROMPTS))


def test_what_unused_rows_hold_changes_nothing(
    models: ColocatedModels,
    executors: Callable[[WorkerConfig], Executor],
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
) -> None:
    executor = executors(config_of(models.target, overlapped(models, "eagle3", topk=4)))
    target = ColocatedTarget(executor)
    target.run(target.make_reqs(PROMPTS[:1], GREEDY))  # from here on there is a state
    state = path_of(executor)._state
    assert state._hidden is not None
    with torch.inference_mode():
        state._ints.fill_(1 << 40)
        for floats in (state._topk_p, state._hidden):
            floats.fill_(torch.nan)
    reqs = target.make_reqs(PROMPTS, ending(SAMPLED))
    assert target.run(reqs) == say(ending(SAMPLED))


def test_a_req_goes_on_in_vain_for_one_step(
    models: ColocatedModels, executors: Callable[[WorkerConfig], Executor]
) -> None:
    """And for no more: nothing is launched for it once its end is known."""
    executor = executors(config_of(models.target, overlapped(models, "eagle", topk=1)))
    target = ColocatedTarget(executor)
    reqs = target.make_reqs(PROMPTS, ending(GREEDY))
    target.run(reqs)
    for req in reqs:
        num_rows = sum(row.req_pool_index == req.row for plan in target.plans for row in plan.rows)
        assert num_rows == req.num_steps + 1


def test_logprobs_are_those_of_plain_decoding(
    models: ColocatedModels, executors: Callable[[WorkerConfig], Executor]
) -> None:
    want, got = (
        logged(executors(config_of(models.target, spec, page_size=16)), PARAMS[3])
        for spec in (None, overlapped(models, "eagle", topk=4))
    )
    assert len(want) == PARAMS[3].max_tokens
    assert [token for token, _ in got[: len(want)]] == [token for token, _ in want]
    for (_, logprob), (_, wanted) in zip(got, want, strict=False):
        assert logprob == pytest.approx(wanted, abs=1e-3)


def logged(executor: Executor, params: SamplingParams) -> list[tuple[int, float]]:
    """The tokens of one req, and their log-probabilities."""
    target = ColocatedTarget(executor)
    (req,) = target.make_reqs(PROMPTS[3:], params)
    shape = default_shape(executor.config.spec) if executor.is_overlapped else None
    found: list[tuple[int, float]] = []
    for step_id in count():
        plan = StepPlan(step_id, (target._row(req),), shape)
        reply = executor.execute(plan, [replace(req.sampling(), wants_logprobs=True)])
        found += zip(reply.rows[0].new_ids, reply.rows[0].logprobs, strict=True)
        target._commit(req, reply.rows[0])
        if req.is_done:
            return found
    raise AssertionError("unreachable")


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_loop_short_of_pages_gives_the_tokens_of_plain_decoding(
    models: ColocatedModels, method: SpecMethod, topk: int
) -> None:
    """Prefix hits, preemption and late results included."""
    outputs = []
    for spec, num_pages in ((None, 0), (overlapped(models, method, topk=topk), SHORT_OF_PAGES)):
        config = config_of(models.target, spec, num_pages=num_pages)
        scheduler = replace(config.scheduler, chunked_prefill_size=CHUNK_SIZE)
        executor = build_executor(replace(config, scheduler=scheduler))
        group = LoopGroup(executor)
        outputs.append([group.generate(TEXTS, params) for params in LONG_PARAMS])
        num_preempted, num_cached = group.total("num_preemptions"), group.total("cached_tokens")
        group.close()
        executor.shutdown()
    assert outputs[0] == outputs[1]
    assert num_preempted > 0
    assert num_cached > 0


def test_a_ranks_shard_speaks_as_the_whole(
    models: ColocatedModels, say: Callable[[Sequence[SamplingParams]], list[list[int]]]
) -> None:
    """Drafts and verdicts are tp_rank 0's, for greedy reqs too."""
    config = config_of(models.target, overlapped(models, "eagle3", topk=4), page_size=16)
    with tp_executor(config, 2) as executor:
        for params in (GREEDY, SAMPLED):
            target = ColocatedTarget(executor, chunk_size=CHUNK_SIZE)
            reqs = target.make_reqs(PROMPTS, ending(params))
            assert target.run(reqs) == say(ending(params))
            assert sum(sum(req.accept_lengths) for req in reqs) > 0


def test_choices_made_for_whole_batches_at_once_are_the_same(
    models: ColocatedModels, say: Callable[[Sequence[SamplingParams]], list[list[int]]]
) -> None:
    """As on a GPU, where nothing may be read back."""
    config = config_of(models.target, overlapped(models, "eagle", topk=4), page_size=16)
    executor = build_executor(config)
    path = path_of(executor)
    executor._path = OverlapPath(config, path._runner, path._draft, path._collective, is_dense=True)
    for params in PARAMS:
        target = ColocatedTarget(executor, chunk_size=CHUNK_SIZE)
        reqs = target.make_reqs(PROMPTS, ending(params))
        assert target.run(reqs) == say(ending(params))
        assert sum(sum(req.accept_lengths) for req in reqs) > 0
    executor.shutdown()


class FirstRuns:
    """As `CudaGraphs` without a GPU: what ran first for a key runs again, on inputs of its own."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Tensor, Callable[[Tensor], Any]]] = {}
        self.num_repeated = 0

    def run(self, key: Hashable, inputs: Tensor, work: Callable[[Tensor], Any]) -> Any:
        self.num_repeated += key in self._known
        own, first = self._known.setdefault(key, (inputs.clone(), work))
        own.copy_(inputs)
        return first(own)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize(("method", "topk"), [("eagle", 4), ("eagle3", 1), ("standalone", 1)])
def test_a_round_may_be_repeated_for_any_that_the_host_calls_its_equal(
    models: ColocatedModels,
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
    method: SpecMethod,
    topk: int,
    rule: VerifyRule,
) -> None:
    """With other reqs, of other lengths, or padding: what it needs of them is on the device."""
    spec = replace(overlapped(models, method, topk=topk), rule=rule)
    config = config_of(models.target, spec, page_size=16)
    executor = build_executor(config)
    path, graphs = path_of(executor), FirstRuns()
    executor._path = OverlapPath(
        config, path._runner, path._draft, path._collective, graphs, is_dense=True
    )
    shapes = [default_shape(spec), SpecShape(2, 1, 3), SpecShape(0, topk, 1)]
    for i, params in enumerate([*PARAMS, GREEDY, SAMPLED] if rule == "coupled" else [GREEDY] * 3):
        mixed = partial(lambda other, step: shapes[0 if step % 4 == 0 else other], i % 3)
        target = ColocatedTarget(executor, chunk_size=CHUNK_SIZE, shapes=mixed)
        reqs = target.make_reqs(PROMPTS, ending(params))
        assert target.run(reqs) == say(ending(params))
        assert sum(sum(req.accept_lengths) for req in reqs) > 0
    assert graphs.num_repeated > 20
    executor.shutdown()


@pytest.mark.parametrize(
    ("method", "num_steps", "topk"), [("eagle", 2, 2), ("eagle", 1, 2), ("standalone", 3, 1)]
)
def test_kernels_of_triton_give_the_same_tokens_and_drafts(
    models: ColocatedModels,
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
    method: SpecMethod,
    num_steps: int,
    topk: int,
) -> None:
    """As on a GPU, with several rows of one token each in some forwards."""
    spec = overlapped(models, method, num_steps=num_steps, topk=topk)
    shapes = [default_shape(spec), SpecShape(0, topk, 1), SpecShape(num_steps, 1, num_steps + 1)]
    short = [replace(params, max_tokens=9) for params in ending(GREEDY)]
    runs = []
    kernel_sets: tuple[KernelSetName, ...] = ("reference", "triton")
    for kernels in kernel_sets:
        config = config_of(models.target, spec, page_size=16, kernels=kernels)
        executor = build_executor(config)
        path = path_of(executor)
        executor._path = OverlapPath(
            config, path._runner, path._draft, path._collective, is_dense=True
        )
        target = ColocatedTarget(executor, shapes=lambda step: shapes[step % 3])
        reqs = target.make_reqs(PROMPTS, short)
        assert target.run(reqs) == say(short)
        runs.append([req.accept_lengths for req in reqs])
        executor.shutdown()
    assert runs[0] == runs[1]
    assert sum(map(sum, runs[0])) > 0


def test_rejection_leaves_greedy_text_as_it_is(
    models: ColocatedModels,
    executors: Callable[[WorkerConfig], Executor],
    say: Callable[[Sequence[SamplingParams]], list[list[int]]],
) -> None:
    spec = replace(overlapped(models, "eagle", topk=4), rule="rejection")
    target = ColocatedTarget(executors(config_of(models.target, spec)))
    assert target.run(target.make_reqs(PROMPTS, PARAMS[2])) == say([PARAMS[2]] * len(PROMPTS))
