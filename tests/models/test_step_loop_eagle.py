"""The step loop over real ranks that draft, both paths: the tokens of plain decoding, however reqs
come and go, share prefixes, are cut into chunks or preempted."""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.cluster.group.step_loop import NewReq, ReqEvent
from paceline.worker.config import Overlap, SpecConfig, SpecMethod
from paceline.worker.errors import InternalError, Unavailable
from paceline.worker.spec.limits import reserve_len
from paceline.worker.step import FinishReason, ReqId, SamplingParams
from paceline.worker.target.build import build_executor
from tests.colocated_models import ColocatedModels, make_colocated_models
from tests.loop_group import GREEDY, MAX_TOKENS, PROMPTS, SAMPLED, SHARED, LoopGroup
from tests.spec_harness import worker_config

METHODS: list[tuple[SpecMethod, int]] = [("eagle", 1), ("eagle3", 1), ("eagle3", 3)]
METHODS += [("standalone", 1), ("standalone", 2)]
PATHS = pytest.mark.parametrize("overlap", ["off", "on"])
DRAFTS = pytest.mark.parametrize(("method", "topk"), METHODS)
# Beside plain requests some that cut a run short, or whose logits depend on what was emitted.
CHANGES = [
    {}, {"max_tokens": 1}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7},
    {"logit_bias": ((7, 3.0),)}, {"min_tokens": 20}, {"max_tokens": 7}, {"max_tokens": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("colocated"))


def params_of(base: SamplingParams) -> list[SamplingParams]:
    """With a seed of its own for each prompt."""
    return [
        replace(base, seed=base.seed + i, **changes)  # type: ignore[arg-type]  # per field
        for i, changes in enumerate(CHANGES)
    ]


@pytest.fixture(scope="module")
def plain(models: ColocatedModels) -> dict[str, list[list[int]]]:
    """What plain decoding says to PROMPTS."""
    executor = build_executor(worker_config(models.target, page_size=16, num_pages=128))
    group = LoopGroup(executor)
    found = {
        "greedy": group.generate(PROMPTS, params_of(GREEDY)),
        "sampled": group.generate(PROMPTS, params_of(SAMPLED)),
    }
    group.close()
    executor.shutdown()
    return found


def spec_of(models: ColocatedModels, method: SpecMethod, topk: int, overlap: Overlap) -> SpecConfig:
    return SpecConfig(
        method=method,
        num_steps=3,
        topk=topk,
        num_draft_tokens=4 if topk == 1 else 7,
        draft_model=str(models.drafts[method]),
        placement="colocated",
        overlap=overlap,
        adaptive=False,
    )


@contextmanager
def loop_group(
    target: Path,
    spec: SpecConfig,
    *,
    page_size: int = 4,
    num_pages: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 96,
    max_model_len: int = 128,
) -> Iterator[LoopGroup]:
    executor = build_executor(
        worker_config(
            target,
            spec=spec,
            page_size=page_size,
            num_pages=num_pages,
            chunked_prefill_size=8,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
    )
    assert executor.is_overlapped == (spec.overlap == "on")
    group = LoopGroup(executor)
    yield group
    group.close()
    executor.shutdown()


@PATHS
@DRAFTS
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_mixed_batch_gives_the_tokens_of_plain_decoding_on_prefix_miss_and_hit(
    models: ColocatedModels,
    plain: dict[str, list[list[int]]],
    method: SpecMethod,
    topk: int,
    overlap: Overlap,
    page_size: int,
) -> None:
    spec = spec_of(models, method, topk, overlap)
    with loop_group(models.target, spec, page_size=page_size, num_pages=1024 // page_size) as group:
        assert group.generate(PROMPTS, params_of(GREEDY)) == plain["greedy"]
        receipts = group.receipts()
        accepted = sum(receipt.accepted_tokens for receipt in receipts)
        proposed = sum(receipt.proposed_tokens for receipt in receipts)
        assert 0.05 * proposed < accepted < proposed
        assert group.generate(PROMPTS, params_of(SAMPLED)) == plain["sampled"]
        assert sum(receipt.cached_tokens for receipt in group.receipts()) > len(SHARED)


@PATHS
@DRAFTS
def test_preemption_changes_no_token(
    models: ColocatedModels,
    plain: dict[str, list[list[int]]],
    method: SpecMethod,
    topk: int,
    overlap: Overlap,
) -> None:
    spec = spec_of(models, method, topk, overlap)
    # The longest req and its reserve must fit alone.
    num_pages = 80 + 2 * reserve_len(spec, spec.overlap == "on")
    with loop_group(
        models.target, spec, page_size=1, num_pages=num_pages, max_model_len=80
    ) as group:
        assert group.generate(PROMPTS, params_of(SAMPLED)) == plain["sampled"]
        assert group.total("num_preemptions") > 0


@PATHS
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_draft_that_is_always_right_guesses_in_every_step(
    models: ColocatedModels, overlap: Overlap, page_size: int
) -> None:
    """It reads the last new token as well, for which there must be a slot."""
    spec = replace(spec_of(models, "standalone", 1, overlap), draft_model=str(models.target))
    with loop_group(models.target, spec, page_size=page_size) as group:
        group.generate(PROMPTS, replace(GREEDY, ignore_eos=True))
        assert group.total("fallback_steps") == 0
        assert group.total("accepted_tokens") > 0.7 * group.total("completion_tokens")


@PATHS
def test_trees_cut_to_what_a_step_has_room_for_change_no_token(
    models: ColocatedModels, plain: dict[str, list[list[int]]], overlap: Overlap
) -> None:
    spec = spec_of(models, "eagle3", 3, overlap)
    for max_num_batched_tokens in (8, 19):
        with loop_group(
            models.target, spec, max_num_batched_tokens=max_num_batched_tokens
        ) as group:
            assert group.generate(PROMPTS, params_of(GREEDY)) == plain["greedy"]


@PATHS
def test_the_depth_may_change_at_any_step(
    models: ColocatedModels, plain: dict[str, list[list[int]]], overlap: Overlap
) -> None:
    """Among others to no drafts at all and back: the draft's KV is right all the same."""
    spec = replace(spec_of(models, "eagle3", 3, overlap), adaptive=True)
    with loop_group(models.target, spec) as group:
        for _ in range(3):
            assert group.generate(PROMPTS, params_of(GREEDY)) == plain["greedy"]
        assert group.total("accepted_tokens") > 0


@PATHS
@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("eagle3", 3), ("standalone", 2)])
def test_arrivals_cancels_and_a_turn_again_leave_the_others_their_tokens(
    models: ColocatedModels,
    plain: dict[str, list[list[int]]],
    method: SpecMethod,
    topk: int,
    overlap: Overlap,
) -> None:
    params = params_of(SAMPLED)
    with loop_group(models.target, spec_of(models, method, topk, overlap), max_num_seqs=4) as group:
        events: dict[str, list[ReqEvent]] = {}

        def submit(req_id: str, i: int, given: int = 0) -> None:
            events[req_id] = []
            req = NewReq(ReqId(req_id), PROMPTS[i], plain["sampled"][i][:given], params[i])
            group.loop.submit(req, events[req_id].append)

        def tokens(req_id: str) -> list[int]:
            return [token for event in events[req_id] for token in event.new_ids]

        for i in range(len(PROMPTS)):
            submit(f"stays {i}", i)
            submit(f"goes {i}", i)
            group.loop.step_once()
            group.loop.step_once()
            if i % 2:
                group.loop.abort(ReqId(f"goes {i}"))  # if it has not ended yet
        submit("resumed", 5, given=9)
        while group.loop.step_once():
            pass
        assert group.loop.healthy
        for i, want in enumerate(plain["sampled"]):
            assert tokens(f"stays {i}") == want
            if events[f"goes {i}"][-1].finish_reason is FinishReason.ABORT:
                assert tokens(f"goes {i}") == want[: len(tokens(f"goes {i}"))]
            else:
                assert tokens(f"goes {i}") == want
        assert tokens("resumed") == plain["sampled"][5][9:]
        assert any(e[-1].finish_reason is FinishReason.ABORT for e in events.values())


@PATHS
def test_the_end_of_the_model_is_met_exactly(models: ColocatedModels, overlap: Overlap) -> None:
    """Drafts reach beyond the last position; what they write there is nobody's."""
    prompts = [PROMPTS[3], PROMPTS[5]]
    params = replace(GREEDY, max_tokens=1000, ignore_eos=True)
    outputs = []
    for spec in (SpecConfig(), spec_of(models, "eagle3", 3, overlap)):
        executor = build_executor(
            worker_config(models.target, spec=spec, page_size=1, num_pages=200, max_model_len=60)
        )
        group = LoopGroup(executor)
        outputs.append(group.generate(prompts, params))
        group.close()
        executor.shutdown()
    assert outputs[0] == outputs[1]
    assert [len(output) for output in outputs[0]] == [60 - len(prompt) for prompt in prompts]


@PATHS
def test_a_stop_in_mid_stream_tells_right_tokens_and_returns_every_page(
    models: ColocatedModels, plain: dict[str, list[list[int]]], overlap: Overlap
) -> None:
    with loop_group(models.target, spec_of(models, "eagle3", 1, overlap)) as group:
        events: list[ReqEvent] = []
        req = NewReq(ReqId("r"), PROMPTS[0], [], params_of(GREEDY)[0])
        group.loop.submit(req, events.append)
        for _ in range(4):
            group.loop.step_once()
        group.loop.stop()
        assert isinstance(events[-1].error, Unavailable)
        told = [token for event in events for token in event.new_ids]
        assert 0 < len(told) < MAX_TOKENS
        assert told == plain["greedy"][0][: len(told)]


@PATHS
@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("eagle3", 3), ("standalone", 2)])
def test_a_req_that_overflows_ends_alone(
    models: ColocatedModels, tmp_path: Path, method: SpecMethod, topk: int, overlap: Overlap
) -> None:
    """The activations of one token are infinite: NaN in all that follows it, and only there."""
    spec = spec_of(models, method, topk, overlap)
    with loop_group(models.target, spec) as group:
        truth = group.generate(PROMPTS)
    said = Counter(token for output in truth for token in dict.fromkeys(output[:-1]))
    prompted = {token for prompt in PROMPTS for token in prompt}
    token = next(t for t, count in said.items() if count == 1 and t not in prompted)
    sick = next(i for i, output in enumerate(truth) if token in output[:-1])
    target = Path(shutil.copytree(models.target, tmp_path / "target"))
    state = load_file(target / "model.safetensors")
    state["model.embed_tokens.weight"][token] = float("inf")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    with loop_group(target, spec) as group:
        for _ in range(2):  # the second time on pages that held NaN
            outputs = group.generate([*PROMPTS, [*SHARED, token]])
            assert outputs.pop() == []
            assert outputs.pop(sick) == truth[sick][: truth[sick].index(token) + 1]
            assert outputs == [output for i, output in enumerate(truth) if i != sick]
        errors = [events[-1].error for events in group.events.values() if events[-1].error]
        assert len(errors) == 4
        assert all(isinstance(error, InternalError) for error in errors)
