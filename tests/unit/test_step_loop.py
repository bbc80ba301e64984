"""The step loop over a toy model: what reqs are told, and what is left behind."""

import threading
from collections.abc import Iterable, Sequence

import pytest

from paceline.cluster.group.step_loop import NewReq, ReqEvent
from paceline.cluster.scheduling.admission import AdmissionLimits
from paceline.worker.clock import FakeClock, SystemClock
from paceline.worker.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from paceline.worker.spec.drafter import DraftContext, DraftHealth
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import (
    FinishReason,
    PageId,
    Phase,
    ReqId,
    SamplingParams,
    SamplingRow,
    StepPlan,
    StepReply,
)
from tests.polling import wait_for
from tests.toy import EOS, VOCAB_SIZE, ToyDrafter, ToyGroup, generate, long_prompt

# ---- output


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, 3, 4, 5, 8, 9, 40])
def test_output_is_that_of_the_model(num_prompt_tokens: int) -> None:
    group = ToyGroup()
    prompt = long_prompt(num_prompt_tokens)
    group.submit("r", prompt, 24)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 24)
    last = group.last("r")
    assert last.finish_reason is FinishReason.LENGTH
    assert last.matched_token_id is None
    group.assert_all_pages_returned()


def test_tokens_come_one_event_per_step() -> None:
    group = ToyGroup()
    group.submit("r", long_prompt(4), 5)
    group.run_until_idle()
    assert [len(event.new_ids) for event in group.events["r"]] == [1] * 5


def test_a_stop_token_ends_a_req_and_is_named() -> None:
    prompt = long_prompt(6)
    expected = generate(prompt, 24)
    stop = expected[9]
    group = ToyGroup(drafter=ToyDrafter(1, hit_rate=1.0), num_draft_tokens=8)
    group.submit("r", prompt, 24, stop_token_ids=(stop,))
    group.run_until_idle()
    assert group.output("r") == expected[: expected.index(stop) + 1]
    assert group.last("r").finish_reason is FinishReason.STOP
    assert group.last("r").matched_token_id == stop
    group.assert_all_pages_returned()


def test_eos_ends_a_req_unless_it_is_ignored() -> None:
    prompt = next(p for p in ([i, 3, 5] for i in range(50)) if EOS in generate(p, 12))
    group = ToyGroup()
    group.submit("ends", prompt, 40)
    group.submit("goes on", prompt, 40, ignore_eos=True)
    group.run_until_idle()
    assert group.output("ends") == generate(prompt, 40)
    assert group.last("ends").matched_token_id == EOS
    assert group.output("goes on") == generate(prompt, 40, eos=None)
    assert group.last("goes on").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("topk", [0, 1, 3])
def test_the_context_length_ends_a_req(topk: int) -> None:
    drafter = ToyDrafter(3, topk=topk, hit_rate=0.9) if topk else None
    group = ToyGroup(max_model_len=30, drafter=drafter, topk=max(topk, 1), num_draft_tokens=8)
    prompt = long_prompt(20)
    group.submit("r", prompt, 1000)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 10)
    assert group.last("r").finish_reason is FinishReason.LENGTH
    group.assert_all_pages_returned()


def test_a_pool_smaller_than_the_model_bounds_the_length_instead_of_failing() -> None:
    group = ToyGroup(num_pages=5, page_size=4, max_model_len=96)
    assert group.loop.max_model_len == 20
    prompt = long_prompt(19)
    group.submit("r", prompt, 50)
    group.submit("s", long_prompt(9), 50)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 1)
    assert len(group.output("s")) == 11
    with pytest.raises(InvalidRequest, match="20"):
        group.submit("t", long_prompt(20))


def test_max_tokens_1_of_the_first_leaves_the_others_their_own_tokens() -> None:
    group = ToyGroup(drafter=ToyDrafter(2))
    prompts = [long_prompt(5, start=i * 10 + 1) for i in range(3)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 1 if i == 0 else 20)
    group.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 1 if i == 0 else 20)


# ---- prefix cache, preemption, resumption


def test_a_second_req_reuses_the_prefix_and_computes_only_the_rest() -> None:
    group = ToyGroup()
    prompt = long_prompt(22)
    group.submit("miss", prompt, 4)
    group.run_until_idle()
    group.executor.plans.clear()
    group.submit("hit", prompt, 4)
    group.run_until_idle()
    assert group.output("hit") == group.output("miss") == generate(prompt, 4)
    first = group.executor.plans[0].rows[0]
    assert (first.prefix_len, len(first.input_ids)) == (20, 2)
    for req_id, cached in (("miss", 0), ("hit", 20)):
        receipt = group.last(req_id).receipt
        assert receipt is not None
        assert receipt.cached_tokens == cached


def test_output_joins_the_cache_so_that_a_second_turn_finds_it() -> None:
    group = ToyGroup()
    prompt = long_prompt(7)
    group.submit("turn 1", prompt, 10)
    group.run_until_idle()
    second = prompt + group.output("turn 1") + [5, 6]
    group.submit("turn 2", second, 4)
    group.run_until_idle()
    assert group.output("turn 2") == generate(second, 4)
    receipt = group.last("turn 2").receipt
    assert receipt is not None
    assert receipt.cached_tokens == 16  # all 17 tokens but the last have KV: 4 pages


def test_equal_prompts_at_once_end_up_on_the_same_pages() -> None:
    group = ToyGroup(chunked_prefill_size=0)
    prompt = long_prompt(16)
    for i in range(4):
        group.submit(f"r{i}", prompt, 8)
    group.loop.step_once()
    group.loop.step_once()
    snapshot = group.loop.snapshot()
    assert snapshot.num_pages - snapshot.num_free_pages == 4 + 4  # shared prompt, one tail each
    group.run_until_idle()
    for i in range(4):
        assert group.output(f"r{i}") == generate(prompt, 8)


def test_a_prefix_is_looked_up_once_while_its_req_waits_and_the_cache_stays() -> None:
    group = ToyGroup(num_pages=8, page_size=4)
    group.submit("runs", long_prompt(20), 12)
    while not group.output("runs"):
        group.loop.step_once()
    pages = group.loop._table._pages
    match, lookups = pages.match, list[int]()

    def count(ids: Sequence[int]) -> tuple[PageId, ...]:
        lookups.append(len(ids))
        return match(ids)

    pages.match = count  # type: ignore[method-assign]
    prompt = long_prompt(27)
    group.submit("waits", prompt, 5)
    for _ in range(8):
        group.loop.step_once()
    assert not group.output("waits")
    assert lookups == [27]
    group.run_until_idle()
    assert lookups == [27, 27]  # what the other left is there now
    assert group.output("waits") == generate(prompt, 5)


def test_without_prefix_caching_every_page_is_free_in_the_end() -> None:
    group = ToyGroup(enable_prefix_caching=False)
    prompt = long_prompt(22)
    for req_id in ("a", "b"):
        group.submit(req_id, prompt, 4)
        group.run_until_idle()
        assert group.output(req_id) == generate(prompt, 4)
    assert group.loop.snapshot().num_free_pages == 64


@pytest.mark.parametrize("urgent", [0, 3])
def test_reqs_preempted_for_want_of_pages_still_give_the_same_tokens(urgent: int) -> None:
    group = ToyGroup(num_pages=12, max_model_len=40, drafter=ToyDrafter(4))
    prompts = [long_prompt(9, start=i * 10 + 1) for i in range(4)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24, priority=int(i == urgent))
    group.run_until_idle()
    receipts = [group.last(f"r{i}").receipt for i in range(4)]
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 24)
    preemptions = [receipt.num_preemptions for receipt in receipts if receipt is not None]
    assert sum(preemptions) > 0
    assert preemptions[urgent] == 0
    group.assert_all_pages_returned()


def test_a_req_resumed_from_elsewhere_goes_on_with_the_same_tokens() -> None:
    prompt = long_prompt(9)
    whole = generate(prompt, 24)
    group = ToyGroup(drafter=ToyDrafter(5))
    group.submit("r", prompt, 24, output_ids=whole[:10])
    group.run_until_idle()
    assert group.output("r") == whole[10:]
    receipt = group.last("r").receipt
    assert receipt is not None
    assert (receipt.prompt_tokens, receipt.completion_tokens) == (9, 14)


@pytest.mark.parametrize("num_output", [24, 25])
def test_a_req_resumed_after_its_last_token_ends_at_once(num_output: int) -> None:
    prompt = long_prompt(9, min_output=30)
    group = ToyGroup()
    group.submit("done", prompt, 24, output_ids=generate(prompt, num_output))
    group.submit("stopped", prompt, 24, output_ids=[5, 6, EOS])
    group.run_until_idle()
    assert group.last("done").finish_reason is FinishReason.LENGTH
    assert group.last("stopped").finish_reason is FinishReason.STOP
    assert group.last("stopped").matched_token_id == EOS
    assert group.output("done") == group.output("stopped") == []
    assert group.executor.plans == []


# ---- speculation


class SureDrafter(ToyDrafter):
    """Always right, but for its first answers, which are none."""

    def __init__(self, *, num_misses: int = 0) -> None:
        super().__init__(0)
        self._num_misses = num_misses

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        if self._num_misses > 0:
            self._num_misses -= 1
            return [None for _ in contexts]
        return [
            DraftTree.chain(generate(c.prompt_ids + c.output_ids, c.max_draft_tokens - 1, eos=None))
            for c in contexts
        ]


def test_right_guesses_emit_several_tokens_per_step_and_are_counted() -> None:
    group = ToyGroup(drafter=SureDrafter(num_misses=2), num_draft_tokens=5)
    prompt = long_prompt(8)
    group.submit("r", prompt, 14)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 14)
    receipt = group.last("r").receipt
    assert receipt is not None
    # One token from the prompt, two plain steps, two of 5 tokens, the last one plain again.
    assert (receipt.num_steps, receipt.fallback_steps) == (6, 2)
    assert (receipt.proposed_tokens, receipt.accepted_tokens) == (8, 8)
    assert [len(event.new_ids) for event in group.events["r"]] == [1, 1, 1, 5, 5, 1]


def test_accepted_tokens_behind_a_stop_are_not_counted() -> None:
    prompt = long_prompt(8)
    expected = generate(prompt, 24)
    # The first token comes from the prompt; the second verify row holds tokens 2 to 6.
    stop = next(token for token in expected[2:5] if token not in expected[:2])
    cut = expected.index(stop) + 1

    group = ToyGroup(drafter=SureDrafter(), num_draft_tokens=8)
    group.submit("r", prompt, 24, stop_token_ids=(stop,))
    group.run_until_idle()
    assert group.output("r") == expected[:cut]
    receipt = group.last("r").receipt
    assert receipt is not None
    assert receipt.accepted_tokens == cut - 1
    assert receipt.proposed_tokens == 7
    group.assert_all_pages_returned()


def test_trees_whose_accepted_path_branches_are_stored_in_line() -> None:
    group = ToyGroup(
        drafter=ToyDrafter(8, topk=3, hit_rate=0.7), topk=3, num_draft_tokens=9, page_size=4
    )
    prompts = [long_prompt(7, start=i * 10 + 1) for i in range(4)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24)
    group.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 24)
    branched = [
        row
        for plan in group.executor.plans
        for row in plan.rows
        if row.parents is not None and row.parents != tuple(range(-1, len(row.parents) - 1))
    ]
    assert branched


class WrongDrafter(ToyDrafter):
    """Fails, or answers with what is not a proposal."""

    def __init__(self, how: str) -> None:
        super().__init__(0)
        self._how = how

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        if self._how == "raises":
            raise RuntimeError("the draft is gone")
        if self._how == "short":
            return []
        if self._how == "long":
            return [DraftTree.chain([3] * 40) for _ in contexts]
        return [DraftTree.chain([VOCAB_SIZE]) for _ in contexts]

    def close_reqs(self, req_ids: Iterable[ReqId]) -> None:
        if self._how == "raises":
            raise RuntimeError("the draft is gone")


@pytest.mark.parametrize("how", ["raises", "short", "long", "foreign ids"])
def test_a_wrong_drafter_costs_speed_only(how: str) -> None:
    group = ToyGroup(drafter=WrongDrafter(how))
    prompt = long_prompt(8)
    group.submit("r", prompt, 12)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 12)
    group.assert_all_pages_returned()


def test_the_drafter_may_change_in_mid_stream() -> None:
    first, second = ToyDrafter(1), ToyDrafter(2)
    group = ToyGroup(drafter=first)
    prompt = long_prompt(8)
    group.submit("r", prompt, 24)
    for _ in range(3):
        group.loop.step_once()
    group.loop.set_drafter(None, epoch=2)
    assert not group.loop.snapshot().draft_attached
    group.loop.step_once()
    group.loop.step_once()
    assert group.executor.plans[-1].rows[0].phase is Phase.DECODE
    group.loop.set_drafter(second, epoch=3)
    assert group.loop.snapshot().epoch == group.loop.load().epoch == 3
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 24)
    wait_for(lambda: first.is_shut_down)
    assert not second.is_shut_down
    group.loop.stop()
    wait_for(lambda: second.is_shut_down)


class CountingDrafter(ToyDrafter):
    def health(self) -> DraftHealth:
        return DraftHealth(is_up=True, num_rounds=5, num_late_rounds=2, rtt_s=0.5)


def test_counts_of_drafts_never_shrink_while_drafters_come_and_go() -> None:
    group = ToyGroup()
    assert group.loop.snapshot().draft is group.loop.load().draft is None
    for num_drafters in (1, 2):
        group.loop.set_drafter(CountingDrafter(1), epoch=num_drafters)
        group.loop.step_once()
        health = group.loop.load().draft
        total = DraftHealth(True, "", 5 * num_drafters, 2 * num_drafters, rtt_s=0.5)
        assert health == group.loop.snapshot().draft == total
    group.loop.set_drafter(None, epoch=3)
    group.loop.step_once()
    assert group.loop.load().draft == DraftHealth(False, "", 10, 4)


def test_a_drafter_replaced_before_it_was_used_is_shut_down_too() -> None:
    first, skipped, last = ToyDrafter(1), ToyDrafter(2), ToyDrafter(3)
    group = ToyGroup(drafter=first)
    group.loop.set_drafter(skipped)
    group.loop.set_drafter(last)
    wait_for(lambda: skipped.is_shut_down)
    group.loop.set_drafter(first)
    wait_for(lambda: last.is_shut_down)
    group.loop.step_once()
    assert not first.is_shut_down


def test_the_drafter_hears_of_every_end() -> None:
    drafter = ToyDrafter(1)
    group = ToyGroup(drafter=drafter, num_pages=12, max_model_len=40)
    for i in range(4):
        deadline = group.clock.unix_s() + 5 if i == 1 else None
        group.submit(f"r{i}", long_prompt(9, start=i * 10 + 1), 24, deadline_unix_s=deadline)
    for _ in range(6):
        group.loop.step_once()
    assert drafter.open_ids
    group.loop.abort(ReqId("r0"))
    assert isinstance(group.clock, FakeClock)
    group.clock.advance(6)
    group.run_until_idle()
    assert drafter.open_ids == set()


# ---- ends


def test_an_abort_frees_pages_within_a_step_whatever_the_req_does() -> None:
    group = ToyGroup(max_num_seqs=2, chunked_prefill_size=4)
    group.submit("decodes", long_prompt(4), 24)
    group.loop.step_once()
    group.submit("prefills", long_prompt(40), 24)
    group.loop.step_once()
    group.submit("waits", long_prompt(4, start=9), 24)
    group.loop.step_once()
    for req_id in ("decodes", "prefills", "waits"):
        assert group.loop.abort(ReqId(req_id))
    assert group.loop.step_once()
    for req_id in ("decodes", "prefills", "waits"):
        last = group.last(req_id)
        assert last.finish_reason is FinishReason.ABORT
        assert last.receipt is not None
    assert group.output("decodes") == generate(long_prompt(4), 24)[: len(group.output("decodes"))]
    group.assert_all_pages_returned()
    assert not group.loop.abort(ReqId("decodes"))
    assert not group.loop.step_once()


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_a_passed_deadline_ends_a_req_within_a_step_and_names_the_phase(phase: str) -> None:
    group = ToyGroup(max_num_seqs=1, chunked_prefill_size=4)
    if phase == "queue":
        group.submit("first", long_prompt(4), 60)
        group.loop.step_once()
    deadline = group.clock.unix_s() + 2.0
    group.submit("r", long_prompt(20), 40, deadline_unix_s=deadline)
    for _ in range(8 if phase == "decode" else 2):
        group.loop.step_once()
    assert isinstance(group.clock, FakeClock)
    group.clock.advance(1.9)
    group.loop.step_once()
    assert not any(event.is_last for event in group.events["r"])
    group.clock.advance(0.1)
    group.loop.step_once()
    error = group.last("r").error
    assert isinstance(error, DeadlineExceeded)
    assert error.phase == phase
    group.loop.abort(ReqId("first"))
    group.run_until_idle()
    group.assert_all_pages_returned()


def test_receipts_count_seconds_since_submit() -> None:
    clock = FakeClock()
    group = ToyGroup(clock=clock, on_step=lambda plan: clock.advance(0.5))
    prompt = long_prompt(20)
    group.submit("r", prompt, 4, seed=99)
    clock.advance(0.25)
    group.run_until_idle()
    receipt = group.last("r").receipt
    assert receipt is not None
    # 20 tokens in chunks of 8 are 3 steps, the last of which emits; 3 tokens more.
    assert receipt.time_to_first_token_s == 0.25 + 3 * 0.5
    assert receipt.total_s == 0.25 + 6 * 0.5
    assert (receipt.seed, receipt.num_steps, receipt.completion_tokens) == (99, 4, 4)
    assert (receipt.prompt_tokens, receipt.fallback_steps, receipt.proposed_tokens) == (20, 0, 0)


@pytest.mark.parametrize(
    ("prompt", "changes", "field"),
    [
        ([], {}, "prompt_ids"),
        ([1] * 96, {}, "prompt_ids"),
        ([1, VOCAB_SIZE], {}, "prompt_ids"),
        ([-1], {}, "prompt_ids"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"output_ids": [VOCAB_SIZE]}, "output_ids"),
    ],
)
def test_a_req_that_can_never_run_is_refused_with_its_field(
    prompt: list[int], changes: dict[str, object], field: str
) -> None:
    group = ToyGroup()
    with pytest.raises(InvalidRequest) as caught:
        group.submit("r", prompt, **changes)  # type: ignore[arg-type]  # by parameter
    assert caught.value.field == field
    assert group.loop.is_idle


def test_a_req_id_is_taken_until_its_last_event() -> None:
    group = ToyGroup()
    group.submit("r", long_prompt(4), 2)
    with pytest.raises(AlreadyExists, match="'r'"):
        group.submit("r", long_prompt(4), 2)
    group.run_until_idle()
    group.submit("r", long_prompt(4), 2)
    group.run_until_idle()
    assert len(group.output("r")) == 2


def test_an_abort_that_came_too_late_spares_the_next_req_of_its_id() -> None:
    late: list[bool] = []
    group = ToyGroup(on_step=lambda plan: late.append(group.loop.abort(ReqId("r"))))
    group.submit("r", long_prompt(4), 1)
    group.loop.step_once()
    assert late == [True]
    assert group.last("r").finish_reason is FinishReason.LENGTH
    group.submit("r", long_prompt(4), 1)
    group.loop.step_once()
    assert group.output("r") == generate(long_prompt(4), 1)
    assert group.last("r").finish_reason is FinishReason.LENGTH


def test_too_many_waiting_reqs_are_refused_at_once() -> None:
    group = ToyGroup(max_num_seqs=2, limits=AdmissionLimits(max_waiting_reqs=3))
    for i in range(3):
        group.submit(f"r{i}", long_prompt(4), 8)
    with pytest.raises(Overloaded) as caught:
        group.submit("r3", long_prompt(4), 8)
    assert caught.value.retry_after_s > 0
    group.loop.step_once()
    group.submit("r3", long_prompt(4), 8)
    group.submit("r4", long_prompt(4), 8)
    with pytest.raises(Overloaded):
        group.submit("r5", long_prompt(4), 8)
    group.run_until_idle()
    assert all(group.output(f"r{i}") == generate(long_prompt(4), 8) for i in range(5))


def test_a_failing_sink_ends_its_own_req_only() -> None:
    group = ToyGroup()

    def broken(event: ReqEvent) -> None:
        raise RuntimeError("nobody listens")

    params = SamplingParams(seed=1, max_tokens=20, temperature=0.0)
    group.loop.submit(NewReq(ReqId("broken"), long_prompt(4), [], params), broken)
    group.submit("fine", long_prompt(4), 20)
    group.loop.step_once()
    group.loop.step_once()
    assert group.loop.snapshot().running_req_ids == ("fine",)
    group.run_until_idle()
    assert group.output("fine") == generate(long_prompt(4), 20)


# ---- failure, drain, stop


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(Unavailable("rank 1 is gone"), Unavailable), (RuntimeError("out of memory"), InternalError)],
)
def test_a_failed_step_ends_every_req_and_returns_every_page(
    raised: Exception, expected: type[Exception]
) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 4:
            raise raised

    group = ToyGroup(max_num_seqs=2, on_step=fail, drafter=ToyDrafter(1))
    for i in range(3):
        group.submit(f"r{i}", long_prompt(4), 24)
    group.run_until_idle()
    assert not group.loop.healthy
    assert group.loop.step_id == 4
    for req_id in ("r0", "r1"):
        assert isinstance(group.last(req_id).error, expected)
        assert group.last(req_id).receipt is not None
    assert isinstance(group.last("r2").error, Unavailable)  # it never began
    group.assert_all_pages_returned()
    assert group.loop.load().draining
    with pytest.raises(Unavailable, match="failed"):
        group.submit("r4", long_prompt(4))


@pytest.mark.parametrize("topk", [0, 1, 3])
@pytest.mark.parametrize("num_tokens_before", [0, 6])
def test_an_overflow_ends_its_own_req_alone_and_leaves_nothing_behind(
    topk: int, num_tokens_before: int
) -> None:
    prompts = [long_prompt(13, start=i * 10 + 1) for i in range(4)]
    truth = [generate(prompt, 24) for prompt in prompts]
    last_ids = prompts[1] + truth[1][:num_tokens_before]
    drafter = ToyDrafter(5, topk=topk, hit_rate=0.9) if topk else None
    group = ToyGroup(
        drafter=drafter,
        topk=max(topk, 1),
        num_draft_tokens=8,
        overflows=lambda ids: list(ids[: len(last_ids)]) == last_ids,
    )
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24)
    group.run_until_idle()
    assert group.loop.healthy
    for i in (0, 2, 3):
        assert group.output(f"r{i}") == truth[i]
    assert group.output("r1") == truth[1][:num_tokens_before]
    error = group.last("r1").error
    assert isinstance(error, InternalError)
    assert f"'r1' ended after {num_tokens_before} tokens: overflow" in str(error)
    group.assert_all_pages_returned()
    if drafter is not None:
        assert drafter.open_ids == set()
    # What its prompt computed is in the cache only if a token came of it.
    again = [*prompts[1][:-1], prompts[1][-1] + 1]
    group.submit("again", again, 4)
    group.run_until_idle()
    receipt = group.last("again").receipt
    assert receipt is not None
    assert receipt.cached_tokens == (12 if num_tokens_before else 0)
    assert group.output("again") == generate(again, 4)


def test_a_guess_that_overflows_costs_speed_only() -> None:
    prompt = long_prompt(8)
    truth = generate(prompt, 24)

    def is_wrong(ids: Sequence[int]) -> bool:
        return list(ids) != [*prompt, *truth][: len(ids)]

    group = ToyGroup(drafter=ToyDrafter(1, hit_rate=0.7), overflows=is_wrong)
    group.submit("r", prompt, 24)
    group.run_until_idle()
    assert group.output("r") == truth
    assert all(event.new_ids for event in group.events["r"])
    receipt = group.last("r").receipt
    assert receipt is not None
    assert receipt.accepted_tokens > 0
    assert receipt.num_steps < group.loop.step_id


def test_a_reply_that_does_not_fit_the_plan_fails_the_loop() -> None:
    group = ToyGroup()
    execute = group.executor.execute

    def forgetful(plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> StepReply:
        reply = execute(plan, sampling)
        return StepReply(reply.step_id, reply.rows[1:])

    group.executor.execute = forgetful  # type: ignore[method-assign]
    group.submit("r", long_prompt(4), 8)
    group.loop.run()
    assert not group.loop.healthy
    assert isinstance(group.last("r").error, InternalError)
    group.assert_all_pages_returned()


def start(group: ToyGroup) -> threading.Thread:
    thread = threading.Thread(target=group.loop.run, daemon=True)
    thread.start()
    return thread


def test_stop_ends_what_is_left_and_run_returns() -> None:
    started = threading.Event()
    group = ToyGroup(
        clock=SystemClock(),
        max_num_seqs=1,
        on_step=lambda plan: started.set(),
        max_model_len=20_000,
        num_pages=5000,
    )
    for req_id in ("runs", "waits"):
        group.submit(req_id, long_prompt(4), 19_000, ignore_eos=True)
    thread = start(group)
    assert started.wait(10)
    group.loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    for req_id in ("runs", "waits"):
        assert isinstance(group.last(req_id).error, Unavailable)
    group.assert_all_pages_returned()
    with pytest.raises(Unavailable):
        group.submit("late", long_prompt(4))


def test_drain_lets_reqs_finish_and_refuses_new_ones() -> None:
    group = ToyGroup(clock=SystemClock())
    thread = start(group)
    for i in range(6):
        group.submit(f"r{i}", long_prompt(4), 20)
    assert group.loop.drain(10.0) == 0
    with pytest.raises(Unavailable, match="draining"):
        group.submit("late", long_prompt(4))
    assert group.loop.load().draining
    assert all(group.output(f"r{i}") == generate(long_prompt(4), 20) for i in range(6))
    group.loop.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_drain_aborts_what_is_left_at_its_limit() -> None:
    group = ToyGroup(clock=SystemClock(), max_model_len=20_000, num_pages=5000)
    thread = start(group)
    group.submit("endless", long_prompt(4), 19_000, ignore_eos=True)
    assert group.loop.drain(0.0) == 1
    assert group.last("endless").finish_reason is FinishReason.ABORT
    assert group.loop.is_idle
    group.loop.stop()
    thread.join(10)
    group.assert_all_pages_returned()


def test_an_idle_loop_beats_and_wakes_for_a_req() -> None:
    group = ToyGroup(clock=SystemClock())
    thread = start(group)
    wait_for(lambda: group.executor.num_heartbeats > 0)
    assert group.loop.step_id == 0
    group.submit("r", long_prompt(4), 5)
    wait_for(lambda: group.loop.is_idle)
    assert group.output("r") == generate(long_prompt(4), 5)
    group.loop.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_load_and_snapshot_say_what_the_loop_holds() -> None:
    group = ToyGroup(max_num_seqs=1, chunked_prefill_size=4, group_id="g0")
    group.submit("runs", long_prompt(10), 8)
    group.loop.step_once()
    group.submit("waits", long_prompt(6), 8)
    load = group.loop.load()
    assert (load.group_id, load.page_size, load.num_pages, load.num_free_pages) == ("g0", 4, 64, 61)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_num_reqs) == (1, 1, 1)
    assert load.num_pending_prefill_tokens == 6 + 6
    assert load.req_ids == ("runs", "waits")
    assert not load.draining
    snapshot = group.loop.snapshot()
    assert snapshot.running_req_ids == ("runs",)
    assert snapshot.waiting_req_ids == ("waits",)
    assert snapshot.step_id == load.step_id == 1
    assert not snapshot.draft_attached
    group.run_until_idle()
    assert group.loop.load().num_free_pages == 64


def test_the_toy_model_notices_a_wrong_slot() -> None:
    group = ToyGroup()
    group.submit("r", long_prompt(8), 8)
    group.loop.step_once()
    group.executor.overwrite(req_pool_index=1, position=2, token_id=EOS)
    group.loop.step_once()
    assert not group.loop.healthy
    assert isinstance(group.last("r").error, InternalError)
