"""The step loop where the ranks draft: steps ahead of their results, and what a row owns."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from paceline.cluster.group.step_loop import NewReq, ReqReceipt
from paceline.worker.clock import FakeClock, SystemClock
from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError, DeadlineExceeded, InternalError, Unavailable
from paceline.worker.spec.limits import alloc_len_per_decode, reserve_len
from paceline.worker.step import (
    FinishReason,
    PendingStep,
    Phase,
    ReqId,
    ReqStep,
    SamplingParams,
    SamplingRow,
    StepPlan,
    StepReply,
)
from tests.polling import wait_for
from tests.toy import EOS, ToyDrafter, ToyExecutor, ToyGroup, generate, long_prompt
from tests.toy_colocated import CHAIN, STANDALONE, TREE, ColocatedGroup

SPECS = pytest.mark.parametrize("spec", [CHAIN, TREE, STANDALONE], ids=["chain", "tree", "own"])
BOTH = pytest.mark.parametrize("is_overlapped", [False, True], ids=["sync", "overlap"])


def all_right(num_drafts: int) -> int:
    return num_drafts


def none_right(num_drafts: int) -> int:
    return 0


def script(*lengths: int) -> Callable[[int], int]:
    """These accept lengths, one per row that speculates, then none."""
    left = list(lengths)
    return lambda num_drafts: left.pop(0) if left else 0


def receipt(group: ColocatedGroup, req_id: str) -> ReqReceipt:
    found = group.last(req_id).receipt
    assert found is not None
    return found


def rows_of(group: ColocatedGroup, phase: Phase) -> list[ReqStep]:
    return [row for plan in group.executor.plans for row in plan.rows if row.phase is phase]


def num_owned(group: ColocatedGroup) -> int:
    snapshot = group.loop.snapshot()
    return snapshot.num_pages - snapshot.num_free_pages - snapshot.num_cached_pages


# ---- output


@BOTH
@SPECS
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("accepts", [none_right, all_right, None], ids=["none", "all", "some"])
def test_output_is_that_of_the_model_however_much_is_accepted(
    spec: SpecConfig,
    is_overlapped: bool,
    page_size: int,
    accepts: Callable[[int], int] | None,
) -> None:
    group = ColocatedGroup(
        spec,
        is_overlapped=is_overlapped,
        page_size=page_size,
        num_pages=512 // page_size,
        accept_length=accepts,
    )
    prompts = [long_prompt(n, start=3 * n) for n in (1, 4, 5, 9, 20, 40)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24)
        group.loop.step_once()
    group.run_until_idle()
    assert group.loop.healthy
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 24)
    assert {row.phase for plan in group.executor.plans for row in plan.rows} == {
        Phase.SPECULATE,
        Phase.PREFILL,
    }
    if accepts is all_right:
        depth = min(spec.num_steps, spec.num_draft_tokens - 1) + 1
        assert group.executor.max_lag == (depth if is_overlapped else 0)
    group.assert_all_pages_returned()


@BOTH
@pytest.mark.parametrize("num_reqs", [1, 8])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_200_tokens_are_those_of_the_model(
    spec: SpecConfig, page_size: int, num_reqs: int, is_overlapped: bool
) -> None:
    group = ColocatedGroup(
        spec,
        is_overlapped=is_overlapped,
        page_size=page_size,
        num_pages=4096 // page_size,
        max_model_len=256,
        max_num_seqs=8,
    )
    prompts = [long_prompt(3 + i, start=5 * i) for i in range(num_reqs)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 200)
    group.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 200)
    group.assert_all_pages_returned()


@BOTH
def test_receipts_count_what_was_accepted_of_live_reqs(is_overlapped: bool) -> None:
    """4 verifies accept 6 drafts, so with the prompt's token 11 are emitted: 2.75 for each."""
    spec = replace(CHAIN, num_steps=3, num_draft_tokens=4, adaptive=False)
    group = ColocatedGroup(spec, is_overlapped=is_overlapped, accept_length=script(2, 1, 3, 0))
    prompt = long_prompt(5)
    group.submit("r", prompt, 11)
    group.run_until_idle()
    counts = receipt(group, "r")
    num_verifies = counts.num_steps - 1
    assert (num_verifies, counts.accepted_tokens, counts.completion_tokens) == (4, 6, 11)
    # Where the host knows that one token is left, the last step has no drafts.
    assert counts.proposed_tokens == (12 if is_overlapped else 9)
    assert counts.completion_tokens / num_verifies == 2.75


@BOTH
def test_rows_say_what_the_host_knows_of_them(is_overlapped: bool) -> None:
    group = ColocatedGroup(is_overlapped=is_overlapped, accept_length=script(2, 0))
    prompt = long_prompt(10)
    group.submit("r", prompt, 24)
    group.run_until_idle()
    first, last = rows_of(group, Phase.PREFILL)
    assert (first.next_id, first.num_logits) == (prompt[8], 0)
    assert (last.next_id, last.num_logits) == (-1, 1)
    rows = rows_of(group, Phase.SPECULATE)[:3]
    output = generate(prompt, 24)
    if is_overlapped:
        assert [row.input_ids for row in rows] == [(), (), ()]
        assert [row.prefix_len for row in rows] == [10, 10, 13]
    else:
        assert [row.input_ids for row in rows] == [(output[0],), (output[3],), (output[4],)]
        assert [row.prefix_len for row in rows] == [10, 13, 14]


def test_the_first_token_is_not_waited_for() -> None:
    group = ColocatedGroup()
    group.submit("r", long_prompt(4), 24)
    group.loop.step_once()
    assert [len(group.executor.in_flight), len(group.events["r"])] == [1, 0]
    group.loop.step_once()
    assert [plan.rows[0].phase for plan in group.executor.plans] == [Phase.PREFILL, Phase.SPECULATE]
    assert group.output("r") == generate(long_prompt(4), 1)


@BOTH
def test_a_run_ends_at_its_eos_and_leaves_the_others_their_tokens(is_overlapped: bool) -> None:
    prompt = next(p for p in ([i, 3, 5] for i in range(50)) if EOS in generate(p, 12)[2:8])
    group = ColocatedGroup(is_overlapped=is_overlapped, accept_length=all_right)
    group.submit("before", long_prompt(5), 24)
    group.submit("ends", prompt, 40)
    group.submit("goes on", prompt, 40, ignore_eos=True)
    group.submit("behind", long_prompt(7, start=9), 24)
    group.run_until_idle()
    assert group.output("ends") == generate(prompt, 40)
    assert group.last("ends").matched_token_id == EOS
    assert group.output("goes on") == generate(prompt, 40, eos=None)
    assert group.output("before") == generate(long_prompt(5), 24)
    assert group.output("behind") == generate(long_prompt(7, start=9), 24)
    # Of the drafts of its last step those behind the end were never accepted.
    told = receipt(group, "ends")
    num_surplus = told.num_steps + told.accepted_tokens - told.completion_tokens
    assert num_surplus in (0, 1)
    group.assert_all_pages_returned()


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8])
def test_the_budget_is_met_exactly_whatever_a_run_brings(
    is_overlapped: bool, max_tokens: int
) -> None:
    group = ColocatedGroup(is_overlapped=is_overlapped, accept_length=all_right)
    prompts = [long_prompt(5, start=i * 10 + 1) for i in range(3)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, max_tokens if i == 0 else 20)
    group.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, max_tokens if i == 0 else 20)
        assert group.last(f"r{i}").finish_reason is FinishReason.LENGTH


@BOTH
def test_an_end_behind_the_budget_is_a_length(is_overlapped: bool) -> None:
    prompt = next(p for i in range(900) if EOS in generate(p := [i % 50, i // 50, 5], 5)[3:])
    end = generate(prompt, 5).index(EOS)
    group = ColocatedGroup(is_overlapped=is_overlapped, accept_length=all_right)
    group.submit("r", prompt, end)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, end)
    assert group.last("r").finish_reason is FinishReason.LENGTH


@BOTH
def test_reqs_that_end_in_one_step_leave_nothing(is_overlapped: bool) -> None:
    group = ColocatedGroup(
        is_overlapped=is_overlapped, accept_length=all_right, enable_prefix_caching=False
    )
    for i in range(3):
        group.submit(f"r{i}", long_prompt(6, start=i * 10 + 1), 6)
    group.run_until_idle()
    assert group.loop.snapshot().num_free_pages == 64
    assert {len(group.output(f"r{i}")) for i in range(3)} == {6}


@BOTH
def test_rows_follow_their_reqs_through_ends_and_arrivals(is_overlapped: bool) -> None:
    group = ColocatedGroup(is_overlapped=is_overlapped, accept_length=none_right)
    prompts = [long_prompt(6, start=i * 10 + 1) for i in range(4)]
    for i in range(3):
        group.submit(f"r{i}", prompts[i], 4 if i == 1 else 24)
    while not group.events["r1"] or not group.events["r1"][-1].is_last:
        group.loop.step_once()
    group.submit("r3", prompts[3], 24)
    group.loop.step_once()
    group.loop.step_once()
    table = group.loop._table
    kept = [table.get(ReqId(f"r{i}")) for i in (0, 2, 3)]
    wanted = [req.req_pool_index for req in kept if req is not None]
    assert [row.req_pool_index for row in group.executor.plans[-1].rows] == wanted
    group.run_until_idle()
    for i in (0, 2, 3):
        assert group.output(f"r{i}") == generate(prompts[i], 24)


# ---- counters


@SPECS
def test_steps_that_overlap_count_what_steps_in_turn_count(spec: SpecConfig) -> None:
    """What a req brought after it had ended counts nowhere."""
    told = []
    for is_overlapped in (False, True):
        group = ColocatedGroup(
            spec, is_overlapped=is_overlapped, accept_length=lambda num_drafts: num_drafts // 2
        )
        prompt = next(p for p in ([i, 9, 5] for i in range(50)) if 8 < len(generate(p, 30)) < 20)
        group.submit("r", prompt, 30)
        group.run_until_idle()
        assert group.last("r").finish_reason is FinishReason.STOP
        found = receipt(group, "r")
        told.append((found.num_steps, found.proposed_tokens, found.accepted_tokens))
        assert found.fallback_steps == 0
        rows = rows_of(group, Phase.SPECULATE)
        assert len(rows) == found.num_steps - 1 + is_overlapped
    assert told[0] == told[1]
    assert told[0][2] > 0


# ---- what a row owns


@BOTH
@SPECS
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_row_always_owns_its_full_reserve(
    spec: SpecConfig, is_overlapped: bool, page_size: int
) -> None:
    group = ColocatedGroup(
        spec, is_overlapped=is_overlapped, page_size=page_size, num_pages=512 // page_size
    )
    reserve = reserve_len(spec, is_overlapped)
    assert reserve >= alloc_len_per_decode(spec) * (1 + is_overlapped)
    for i in range(3):
        group.submit(f"r{i}", long_prompt(5 + 7 * i, start=i * 10 + 1), 24)
    seen: dict[int, int] = {}
    while group.loop.step_once():
        for row in group.executor.plans[-1].rows:
            num_pages = row.page_start + len(row.pages)
            if not row.pages:
                num_pages = seen[row.req_pool_index]
            seen[row.req_pool_index] = num_pages
            if row.phase is Phase.SPECULATE:
                # Not a page less, and not a page more, once the tokens have caught up.
                assert num_pages >= -(-(row.prefix_len + reserve) // page_size)
        for req in group.loop._table._running.values():
            assert req.kv_allocated_len % page_size == 0
            surplus = req.kv_allocated_len - req.kv_committed_len
            assert surplus < reserve + page_size + max(5 + 7 * 2, 24)
    group.assert_all_pages_returned()


def test_slots_grow_by_what_was_accepted() -> None:
    """Prompt 5, 5 slots per step: behind a step of 3, 1 and 2 tokens, as many more are taken."""
    group = ColocatedGroup(page_size=1, num_pages=200, accept_length=script(2, 0, 1))
    group.submit("r", long_prompt(5), 24)
    owned = []
    for _ in range(6):
        group.loop.step_once()
        (req,) = group.loop._table._running.values()
        owned.append((req.kv_committed_len, req.kv_allocated_len))
    # Taken at planning, from what was committed then; committed after.
    assert owned == [(5, 15), (5, 15), (8, 15), (9, 18), (11, 19), (12, 21)]


@BOTH
@SPECS
def test_drafts_take_nothing_from_the_pool(spec: SpecConfig, is_overlapped: bool) -> None:
    """They live in the reserve of their row: a step leaves the free list as it was, to the order,
    but for the pages with which its row follows what was committed."""
    group = ColocatedGroup(spec, is_overlapped=is_overlapped, enable_prefix_caching=False)
    group.submit("r", long_prompt(5), 24)
    group.loop.step_once()
    table = group.loop._table
    (req,) = table._running.values()
    num_same = 0
    while True:
        before, owned = list(table._pages._pool._free), list(table._pages.pages_of(1))
        group.loop.step_once()
        if req.has_ended:
            break
        after, now_owned = table._pages._pool._free, table._pages.pages_of(1)
        assert now_owned[: len(owned)] == owned
        assert [*after, *reversed(now_owned[len(owned) :])] == before
        num_same += now_owned == owned
    assert num_same > 0


@BOTH
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_context_length_ends_a_req_though_its_drafts_reach_beyond(
    is_overlapped: bool, page_size: int
) -> None:
    """topk * num_steps is more than num_draft_tokens and a margin of 4."""
    spec = replace(CHAIN, num_steps=6, topk=4, num_draft_tokens=8)
    group = ColocatedGroup(
        spec,
        is_overlapped=is_overlapped,
        page_size=page_size,
        num_pages=512 // page_size,
        max_model_len=32,
        accept_length=all_right,
    )
    for i, num_prompt in enumerate((20, 30, 31)):
        group.submit(f"r{i}", long_prompt(num_prompt), 1000)
    group.run_until_idle()
    for i, num_prompt in enumerate((20, 30, 31)):
        assert group.output(f"r{i}") == generate(long_prompt(num_prompt), 32 - num_prompt)
        assert group.last(f"r{i}").finish_reason is FinishReason.LENGTH
    group.assert_all_pages_returned()


@BOTH
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 64), (4, 16), (16, 5)])
def test_reqs_preempted_for_want_of_pages_still_give_the_same_tokens(
    is_overlapped: bool, page_size: int, num_pages: int
) -> None:
    group = ColocatedGroup(is_overlapped=is_overlapped, page_size=page_size, num_pages=num_pages)
    prompts = [long_prompt(9, start=i * 10 + 1, min_output=40) for i in range(4)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 40)
    group.run_until_idle()
    assert group.loop.healthy
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 40)
    assert sum(receipt(group, f"r{i}").num_preemptions for i in range(4)) > 0
    group.assert_all_pages_returned()


@BOTH
def test_the_pool_bounds_the_length_so_that_a_lone_req_has_its_reserve(
    is_overlapped: bool,
) -> None:
    group = ColocatedGroup(
        is_overlapped=is_overlapped, page_size=4, num_pages=8, accept_length=all_right
    )
    limit = 32 - reserve_len(CHAIN, is_overlapped)
    assert group.loop.max_model_len == limit
    prompt = long_prompt(limit - 5)
    group.submit("r", prompt, 50)
    group.submit("s", long_prompt(9), 50)
    group.run_until_idle()
    assert group.output("r") == generate(prompt, 5)
    assert len(group.output("s")) == limit - 9
    assert receipt(group, "r").num_preemptions == 0
    group.assert_all_pages_returned()


@BOTH
def test_a_pool_without_room_for_one_req_and_its_drafts_is_refused(is_overlapped: bool) -> None:
    reserve = reserve_len(CHAIN, is_overlapped)
    with pytest.raises(ConfigError, match=f"room for {reserve} draft tokens"):
        ColocatedGroup(is_overlapped=is_overlapped, page_size=1, num_pages=reserve + 1)
    group = ColocatedGroup(is_overlapped=is_overlapped, page_size=1, num_pages=reserve + 2)
    group.submit("r", [5], 9)
    group.run_until_idle()
    assert group.output("r") == generate([5], 1)


# ---- the shape of trees


def shapes(group: ColocatedGroup) -> list[tuple[int, int]]:
    found = [plan.shape for plan in group.executor.plans if plan.shape is not None]
    return [(shape.num_steps, shape.num_draft_tokens) for shape in found]


@BOTH
@pytest.mark.parametrize("max_num_batched_tokens", [4, 5, 8, 11, 20])
def test_a_step_has_no_more_tokens_than_it_may(
    is_overlapped: bool, max_num_batched_tokens: int
) -> None:
    group = ColocatedGroup(
        is_overlapped=is_overlapped, max_num_batched_tokens=max_num_batched_tokens
    )
    prompts = [long_prompt(6 + 5 * i, start=i * 10 + 1) for i in range(6)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24)
    group.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 24)
    for plan in group.executor.plans:
        num_nodes = plan.shape.num_draft_tokens if plan.shape is not None else 0
        num_tokens = sum(
            num_nodes if row.phase is Phase.SPECULATE else len(row.input_ids) for row in plan.rows
        )
        assert num_tokens <= max_num_batched_tokens
    assert len(set(shapes(group))) > 1


@BOTH
def test_no_step_drafts_deeper_than_any_req_can_use(is_overlapped: bool) -> None:
    group = ColocatedGroup(is_overlapped=is_overlapped, accept_length=none_right)
    group.submit("r", long_prompt(6), 7)
    group.run_until_idle()
    assert shapes(group) == [(4, 5), (4, 5), (3, 4), (2, 3), (1, 2), (0, 1)]
    assert receipt(group, "r").fallback_steps == 0  # a last token needs no draft


@BOTH
def test_drafts_that_never_pay_are_given_up(is_overlapped: bool) -> None:
    clock = FakeClock()

    def work(plan: StepPlan) -> None:
        shape = plan.shape
        clock.advance(1.0 if shape is None else 1.0 + 0.5 * shape.num_draft_tokens)

    group = ColocatedGroup(
        replace(CHAIN, adaptive=True),
        is_overlapped=is_overlapped,
        accept_length=none_right,
        clock=clock,
        on_step=work,
        max_model_len=400,
        num_pages=128,
    )
    group.submit("r", [5, 6], 350, ignore_eos=True)
    group.run_until_idle()
    assert group.output("r") == generate([5, 6], 350, eos=None)
    late = shapes(group)[-150:-10]
    assert late.count((0, 1)) > 0.9 * len(late)
    assert receipt(group, "r").fallback_steps > 150


# ---- in flight


def in_flight(spec: SpecConfig = CHAIN, **options: object) -> ColocatedGroup:
    """A group with one req, 'r', some of whose tokens are out while a step of it is in flight."""
    group = ColocatedGroup(spec, **options)  # type: ignore[arg-type]  # of ColocatedGroup
    group.submit("r", long_prompt(6), 24)
    for _ in range(3):
        group.loop.step_once()
    assert len(group.executor.in_flight) == 1
    assert group.output("r")
    return group


def test_an_end_is_told_before_the_step_launched_meanwhile_is_collected() -> None:
    group = ColocatedGroup(accept_length=none_right)
    prompt = next(p for p in ([i, 3, 5] for i in range(50)) if EOS in generate(p, 12)[2:])
    group.submit("r", prompt, 40)
    while not group.events["r"] or not group.events["r"][-1].is_last:
        group.loop.step_once()
    assert group.loop.is_idle
    assert len(group.executor.in_flight) == 1
    assert num_owned(group) > 0
    assert group.loop.snapshot().running_req_ids == ()
    assert group.loop.load().num_running_reqs == 0
    assert group.loop.step_once()
    assert num_owned(group) == 0
    assert not group.loop.step_once()
    assert group.output("r") == generate(prompt, 40)
    group.assert_all_pages_returned()


def test_a_req_that_ended_keeps_its_pages_though_the_next_step_is_of_others() -> None:
    """Both parts come back: what it committed, and what it owned beyond."""
    group = ColocatedGroup(accept_length=none_right, enable_prefix_caching=False)
    prompt = next(p for p in ([i, 3, 5] for i in range(50)) if EOS in generate(p, 12)[2:])
    group.submit("ends", prompt, 40)
    while not group.executor.in_flight or len(group.output("ends")) < len(generate(prompt, 40)) - 1:
        group.loop.step_once()
    group.submit("next", long_prompt(30), 2)
    group.loop.step_once()
    assert group.events["ends"][-1].is_last
    group.run_until_idle()
    assert group.output("next") == generate(long_prompt(30), 2)
    assert group.loop.snapshot().num_free_pages == 64


def test_an_abort_in_flight_ends_a_req_at_once_and_drops_what_comes_late() -> None:
    group = in_flight(accept_length=all_right)
    told = group.output("r")
    assert group.loop.abort(ReqId("r"))
    assert group.loop.step_once()
    assert group.last("r").finish_reason is FinishReason.ABORT
    assert group.output("r") == told
    assert receipt(group, "r").completion_tokens == len(told)
    assert not group.executor.in_flight
    assert not group.loop.step_once()
    group.assert_all_pages_returned()


def test_a_deadline_in_flight_ends_a_req_at_once_and_names_the_phase() -> None:
    group = ColocatedGroup()
    assert isinstance(group.clock, FakeClock)
    deadline = group.clock.unix_s() + 2.0
    group.submit("decodes", long_prompt(6), 24, deadline_unix_s=deadline)
    group.submit("goes on", long_prompt(8), 24)
    for _ in range(4):
        group.loop.step_once()
    group.submit("prefills", long_prompt(40), 24, deadline_unix_s=deadline)
    group.loop.step_once()
    group.clock.advance(2.0)
    group.loop.step_once()
    for req_id, phase in (("decodes", "decode"), ("prefills", "prefill")):
        error = group.last(req_id).error
        assert isinstance(error, DeadlineExceeded)
        assert error.phase == phase
    group.run_until_idle()
    assert group.output("goes on") == generate(long_prompt(8), 24)
    group.assert_all_pages_returned()


def test_an_id_may_be_used_again_while_its_last_step_is_in_flight() -> None:
    group = ColocatedGroup(accept_length=none_right)
    prompt = next(p for p in ([i, 3, 5] for i in range(50)) if EOS in generate(p, 12)[2:])
    group.submit("r", prompt, 40)
    while not group.events["r"] or not group.events["r"][-1].is_last:
        group.loop.step_once()
    (old_row,) = group.executor.in_flight[0].rows
    group.submit("r", long_prompt(6), 24)
    group.loop.step_once()
    (new_row,) = group.executor.in_flight[0].rows
    assert new_row.req_pool_index != old_row.req_pool_index
    group.run_until_idle()
    assert group.output("r") == generate(long_prompt(6), 24)
    group.assert_all_pages_returned()


def test_a_row_is_taken_again_only_when_nothing_of_it_is_in_flight() -> None:
    group = ColocatedGroup(max_num_seqs=1, accept_length=all_right)
    prompts = [long_prompt(6, start=i * 10 + 1) for i in range(3)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 9)
    used_at: list[tuple[int, str]] = []
    while group.loop.step_once():
        running = group.loop.snapshot().running_req_ids
        if running and (not used_at or used_at[-1][1] != running[0]):
            rows = [row for plan in group.executor.in_flight for row in plan.rows]
            assert [row.phase for row in rows] == [Phase.PREFILL]
            used_at.append((group.loop.step_id, running[0]))
    assert [req_id for _, req_id in used_at] == ["r0", "r1", "r2"]
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 9)


def test_the_last_result_is_not_held_back_when_there_is_nothing_to_launch() -> None:
    group = ColocatedGroup()
    group.submit("r", long_prompt(6), 1)
    assert group.loop.step_once()
    assert len(group.executor.in_flight) == 1
    assert group.loop.step_once()
    assert group.output("r") == generate(long_prompt(6), 1)
    assert not group.executor.in_flight
    assert len(group.executor.plans) == 1  # its one token was on its way: nothing to guess
    assert not group.loop.step_once()


def test_an_idle_loop_has_nothing_in_flight_when_it_beats() -> None:
    group = ColocatedGroup(clock=SystemClock())
    beats: list[int] = []
    group.executor.heartbeat = (  # type: ignore[method-assign]
        lambda: beats.append(len(group.executor.in_flight))
    )
    thread = threading.Thread(target=group.loop.run, daemon=True)
    thread.start()
    group.submit("r", long_prompt(4), 9)
    wait_for(lambda: bool(beats))
    assert beats[0] == 0
    assert group.output("r") == generate(long_prompt(4), 9)
    group.loop.stop()
    thread.join(10)
    assert not thread.is_alive()


# ---- errors of one req


@BOTH
@pytest.mark.parametrize("accepts", [none_right, all_right], ids=["none", "all"])
@pytest.mark.parametrize("num_tokens_before", [0, 1, 6])
def test_an_overflow_ends_its_own_req_alone(
    is_overlapped: bool, accepts: Callable[[int], int], num_tokens_before: int
) -> None:
    prompts = [long_prompt(13, start=i * 10 + 1) for i in range(4)]
    truth = [generate(prompt, 24) for prompt in prompts]
    last_ids = prompts[1] + truth[1][:num_tokens_before]
    group = ColocatedGroup(
        is_overlapped=is_overlapped,
        accept_length=accepts,
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
    # The last try was without guesses, and it knew where the row stood.
    assert bool(rows_of(group, Phase.DECODE)) == bool(num_tokens_before)
    group.assert_all_pages_returned()
    again = [*prompts[1][:-1], prompts[1][-1] + 1]
    group.submit("again", again, 4)
    group.run_until_idle()
    # The token behind its third page is another.
    assert receipt(group, "again").cached_tokens == (8 if num_tokens_before else 0)
    assert group.output("again") == generate(again, 4)


@BOTH
def test_a_guess_that_overflows_costs_speed_only(is_overlapped: bool) -> None:
    prompts = [long_prompt(8, start=i * 10 + 1) for i in range(3)]
    truths = [[*prompt, *generate(prompt, 24)] for prompt in prompts]

    def is_wrong(ids: Sequence[int]) -> bool:
        return not any(list(ids) == truth[: len(ids)] for truth in truths)

    group = ColocatedGroup(is_overlapped=is_overlapped, overflows=is_wrong)
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24)
    group.run_until_idle()
    for i, prompt in enumerate(prompts):
        assert group.output(f"r{i}") == generate(prompt, 24)
        assert group.last(f"r{i}").finish_reason is FinishReason.LENGTH
    assert rows_of(group, Phase.DECODE)
    assert all(row.prefix_len > 0 and row.input_ids for row in rows_of(group, Phase.DECODE))
    group.assert_all_pages_returned()


# ---- failure, drain, stop


@BOTH
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_failed_step_ends_every_req_and_returns_every_page(
    is_overlapped: bool, where: str
) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_id == 5:
            raise Unavailable("rank 1 is gone")

    group = ColocatedGroup(
        is_overlapped=is_overlapped,
        max_num_seqs=2,
        on_step=fail if where == "launch" else None,
        on_collect=fail if where == "collect" else None,
    )
    for i in range(3):
        group.submit(f"r{i}", long_prompt(4, start=i * 10 + 1), 24)
    for _ in range(4):
        group.loop.step_once()
    group.loop.abort(ReqId("r0"))
    group.run_until_idle()
    assert not group.loop.healthy
    assert group.last("r0").finish_reason is FinishReason.ABORT
    assert isinstance(group.last("r1").error, Unavailable)
    assert isinstance(group.last("r2").error, Unavailable)
    for i in range(2):
        output = group.output(f"r{i}")
        assert output == generate(long_prompt(4, start=i * 10 + 1), 24)[: len(output)]
    group.assert_all_pages_returned()
    assert not group.loop.step_once()
    group.loop.stop()


def test_a_stop_delivers_what_is_in_flight_before_it_ends_the_rest() -> None:
    group = in_flight(accept_length=all_right)
    told = group.output("r")
    group.loop.stop()
    assert isinstance(group.last("r").error, Unavailable)
    output = group.output("r")
    assert len(output) == len(told) + CHAIN.num_steps + 1
    assert output == generate(long_prompt(6), 24)[: len(output)]
    assert not group.executor.in_flight
    group.assert_all_pages_returned()


def test_a_stop_whose_collect_fails_still_ends_every_req() -> None:
    def fail(plan: StepPlan) -> None:
        if is_broken:
            raise RuntimeError("the device is gone")

    is_broken: list[bool] = []
    group = in_flight(on_collect=fail)
    is_broken.append(True)
    group.loop.stop()
    assert isinstance(group.last("r").error, InternalError)
    group.assert_all_pages_returned()


def test_drain_lets_reqs_finish_and_gives_every_page_back() -> None:
    group = ColocatedGroup(clock=SystemClock())
    thread = threading.Thread(target=group.loop.run, daemon=True)
    thread.start()
    for i in range(6):
        group.submit(f"r{i}", long_prompt(4), 20)
    assert group.loop.drain(10.0) == 0
    assert all(group.output(f"r{i}") == generate(long_prompt(4), 20) for i in range(6))
    group.loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert not group.executor.in_flight
    group.assert_all_pages_returned()


# ---- shared prefixes


@BOTH
@pytest.mark.parametrize(
    ("spec", "page_size", "num_cached"),
    [(CHAIN, 1, 9), (CHAIN, 2, 8), (CHAIN, 5, 5), (STANDALONE, 1, 10), (STANDALONE, 5, 10)],
)
def test_a_page_is_shared_only_if_the_token_behind_it_is(
    is_overlapped: bool, spec: SpecConfig, page_size: int, num_cached: int
) -> None:
    """The draft's last slot of a page was computed from that token, if the draft is shifted."""
    group = ColocatedGroup(
        spec, is_overlapped=is_overlapped, page_size=page_size, num_pages=200, max_model_len=60
    )
    prompt = long_prompt(14)
    other = [*prompt[:10], *long_prompt(5, start=20)]
    assert other[10] != prompt[10]
    group.submit("first", prompt, 6)
    group.run_until_idle()
    group.submit("second", other, 6)
    group.run_until_idle()
    assert receipt(group, "second").cached_tokens == num_cached
    assert group.output("second") == generate(other, 6)


@BOTH
@SPECS
def test_a_second_turn_finds_the_first_and_the_drafts_of_it(
    spec: SpecConfig, is_overlapped: bool
) -> None:
    """The toy checks every slot of the draft that a tree starts from."""
    group = ColocatedGroup(spec, is_overlapped=is_overlapped, page_size=4, accept_length=all_right)
    prompt = long_prompt(7)
    group.submit("turn 1", prompt, 10)
    group.run_until_idle()
    second = prompt + group.output("turn 1") + [5, 6]
    group.submit("turn 2", second, 12)
    group.submit("same", second, 12)
    group.run_until_idle()
    assert group.output("turn 2") == group.output("same") == generate(second, 12)
    assert receipt(group, "turn 2").cached_tokens == 16


# ---- drafters on the host


class AsyncToyExecutor(ToyExecutor):
    """Overlaps steps, and leaves drafting to the host."""

    is_overlapped = True
    num_in_flight = 0

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        assert self.num_in_flight == 0, "the host needs the last tokens for the next guesses"
        self.num_in_flight += 1
        executor, reply = self, self.execute(plan, sampling)

        class Pending:
            def collect(self) -> StepReply:
                executor.num_in_flight -= 1
                return reply

        return Pending()


@pytest.mark.parametrize("topk", [0, 1, 3])
def test_with_a_drafter_on_the_host_only_the_sending_overlaps(topk: int) -> None:
    group = ToyGroup(
        make_executor=AsyncToyExecutor,
        drafter=ToyDrafter(1, topk=topk) if topk else None,
        topk=max(topk, 1),
        num_pages=24,
    )
    told_at: list[tuple[int, int]] = []
    params = SamplingParams(seed=1, max_tokens=24, temperature=0.0)
    group.loop.submit(
        NewReq(ReqId("watched"), long_prompt(6), [], params),
        lambda event: told_at.append((len(group.executor.plans), len(event.new_ids))),
    )
    group.loop.step_once()
    prompts = [long_prompt(9, start=i * 10 + 1) for i in range(5)]
    for i, prompt in enumerate(prompts):
        group.submit(f"r{i}", prompt, 24)
    for _ in range(8):
        group.loop.step_once()
    assert group.loop.abort(ReqId("r4"))
    group.run_until_idle()
    # What step 1 chose is told when step 2 is under way.
    assert told_at[0] == (2, 1)
    assert sum(num_new for _, num_new in told_at) == 24
    for i, prompt in enumerate(prompts[:4]):
        assert group.output(f"r{i}") == generate(prompt, 24)
    assert group.last("r4").finish_reason is FinishReason.ABORT
    group.assert_all_pages_returned()


def test_a_drafter_is_never_asked_where_the_ranks_draft() -> None:
    class Nosy(ToyDrafter):
        def propose(self, contexts: object) -> list[None]:  # type: ignore[override]
            raise AssertionError("asked")

    group = ColocatedGroup(drafter=Nosy(1))
    group.submit("r", long_prompt(6), 9)
    group.run_until_idle()
    assert group.output("r") == generate(long_prompt(6), 9)
