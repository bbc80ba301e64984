"""Soak: reqs come, end, are cancelled, expire and are preempted; tokens and pages stay right.

Every output must be a beginning of the undisturbed one, and all of it when nothing cut the req
short. The loop proves its page accounting after every step.
"""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.group.step_loop import NewReq, ReqEvent
from paceline.worker.clock import SystemClock
from paceline.worker.step import FinishReason, ReqId, SamplingParams
from tests.soak import Soak
from tests.toy import VOCAB_SIZE, ToyDrafter, ToyGroup, generate


def soaked(seed: int, num_reqs: int, **options: int | bool) -> Soak:
    topk = int(options.pop("topk", 0))
    group = ToyGroup(
        drafter=ToyDrafter(seed, topk=topk) if topk else None, topk=max(topk, 1), **options
    )
    soak = Soak(group, seed)
    soak.run(num_reqs)
    soak.check()
    return soak


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunked_prefill_size", [0, 5])
@pytest.mark.parametrize("topk", [0, 1, 3])
def test_traffic_in_a_small_pool_ends_with_right_tokens_and_all_pages(
    page_size: int, chunked_prefill_size: int, topk: int
) -> None:
    soak = soaked(
        11,
        150,
        page_size=page_size,
        num_pages=96 // page_size,
        chunked_prefill_size=chunked_prefill_size,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        topk=topk,
        num_draft_tokens=6,
    )
    assert soak.num_preemptions() > 0
    assert soak.num_cached_tokens() > 0


@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_tokens=st.integers(96, 220),
    chunked_prefill_size=st.sampled_from([0, 1, 7, 64]),
    max_num_batched_tokens=st.integers(3, 40),
    max_num_seqs=st.integers(1, 8),
    topk=st.integers(0, 3),
    num_draft_tokens=st.integers(2, 9),
    enable_prefix_caching=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_no_mixture_of_limits_changes_tokens_or_loses_pages(
    seed: int,
    page_size: int,
    num_tokens: int,
    chunked_prefill_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    topk: int,
    num_draft_tokens: int,
    enable_prefix_caching: bool,
) -> None:
    soaked(
        seed,
        20,
        page_size=page_size,
        num_pages=-(-num_tokens // page_size),
        chunked_prefill_size=chunked_prefill_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )


class Stream:
    """The client of one req in another thread than the loop's."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.ids: list[int] = []
        self.last: ReqEvent | None = None
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()

    def __call__(self, event: ReqEvent) -> None:
        self.ids += event.new_ids
        self.has_begun.set()
        if event.is_last:
            assert self.last is None
            self.last = event
            self.has_ended.set()


@pytest.mark.parametrize(("page_size", "topk"), [(1, 0), (4, 1), (16, 3)])
def test_64_streams_of_which_a_third_is_cancelled_leave_the_pool_as_it_was(
    page_size: int, topk: int
) -> None:
    group = ToyGroup(
        page_size=page_size,
        num_pages=640 // page_size,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        max_model_len=120,
        clock=SystemClock(),
        drafter=ToyDrafter(1, topk=topk) if topk else None,
        topk=max(topk, 1),
        enable_prefix_caching=False,
    )
    num_free_before = group.loop.snapshot().num_free_pages
    rand = random.Random(5)
    streams = [Stream([rand.randrange(1, VOCAB_SIZE) for _ in range(20)]) for _ in range(64)]
    cancelled = set(rand.sample(range(64), 21))
    loop_thread = threading.Thread(target=group.loop.run, daemon=True)
    loop_thread.start()

    def serve(numbers: range) -> None:
        for i in numbers:
            params = SamplingParams(seed=i, max_tokens=90, temperature=0.0, ignore_eos=True)
            group.loop.submit(NewReq(ReqId(str(i)), streams[i].prompt, [], params), streams[i])
        for i in numbers:
            if i in cancelled:
                if i % 2:
                    streams[i].has_begun.wait(20)
                group.loop.abort(ReqId(str(i)))

    clients = [threading.Thread(target=serve, args=(range(k, 64, 4),)) for k in range(4)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(30)
    for i, stream in enumerate(streams):
        assert stream.has_ended.wait(30), f"stream {i} did not end"
        expected = generate(stream.prompt, 90, eos=None)
        assert stream.last is not None
        if stream.last.finish_reason is FinishReason.ABORT:
            assert i in cancelled
            assert stream.ids == expected[: len(stream.ids)]
        else:
            assert stream.ids == expected
    assert sum(s.last.finish_reason is FinishReason.ABORT for s in streams if s.last) > 10
    assert group.loop.is_idle
    snapshot = group.loop.snapshot()
    assert (snapshot.num_free_pages, snapshot.num_orphaned_pages) == (num_free_before, 0)
    group.loop.stop()
    loop_thread.join(10)
    assert group.loop.healthy
