"""Soak where the ranks draft: whatever is accepted, fails, ends or is preempted while steps are in
flight, tokens and pages stay right, and no step writes to what its row does not own.

The loop proves its page accounting after every step, the toy executor every slot it touches.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.worker.config import SpecConfig
from tests.soak import Soak
from tests.toy_colocated import STANDALONE, ColocatedGroup

SPECS = [
    SpecConfig(method="eagle3", num_steps=4, num_draft_tokens=5),
    SpecConfig(method="eagle", num_steps=3, topk=2, num_draft_tokens=6),
    STANDALONE,
]


def soaked(
    seed: int,
    num_reqs: int,
    spec: SpecConfig,
    *,
    is_overlapped: bool,
    has_overflows: bool = True,
    **options: int | bool,
) -> Soak:
    group = ColocatedGroup(
        spec,
        is_overlapped=is_overlapped,
        spoils=lambda ids: has_overflows and sum(ids[-3:]) % 5 == 0,
        **options,
    )
    soak = Soak(group, seed)
    soak.run(num_reqs)
    assert group.loop.healthy
    assert not group.executor.in_flight
    soak.check()
    assert (group.executor.max_lag > 0) == is_overlapped
    return soak


def soaked_in_a_small_pool(
    page_size: int, spec: SpecConfig, *, is_overlapped: bool, num_reqs: int, seed: int = 23
) -> None:
    soak = soaked(
        seed,
        num_reqs,
        spec,
        is_overlapped=is_overlapped,
        page_size=page_size,
        num_pages=128 // page_size,
        chunked_prefill_size=5,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        max_model_len=90,
    )
    assert soak.num_preemptions() > 0
    if page_size < 16:  # few have a page of 16 in common
        assert soak.num_cached_tokens() > 0


@pytest.mark.parametrize("is_overlapped", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("spec", SPECS, ids=["chain", "tree", "own"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_traffic_in_a_small_pool_ends_with_right_tokens_and_all_pages(
    page_size: int, spec: SpecConfig, is_overlapped: bool
) -> None:
    soaked_in_a_small_pool(page_size, spec, is_overlapped=is_overlapped, num_reqs=80)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize("spec", SPECS[:2], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_thousands_of_steps_end_with_right_tokens_and_all_pages(
    page_size: int, spec: SpecConfig, is_overlapped: bool
) -> None:
    for seed in range(4):
        soaked_in_a_small_pool(
            page_size, spec, is_overlapped=is_overlapped, num_reqs=1000, seed=seed
        )


@given(
    seed=st.integers(0, 2**32),
    spec=st.sampled_from(SPECS),
    is_overlapped=st.booleans(),
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_tokens=st.integers(120, 240),
    chunked_prefill_size=st.sampled_from([0, 1, 7, 64]),
    max_num_batched_tokens=st.integers(3, 40),
    max_num_seqs=st.integers(1, 8),
    enable_prefix_caching=st.booleans(),
    has_overflows=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_no_mixture_of_limits_changes_tokens_or_loses_pages(
    seed: int,
    spec: SpecConfig,
    is_overlapped: bool,
    page_size: int,
    num_tokens: int,
    chunked_prefill_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    enable_prefix_caching: bool,
    has_overflows: bool,
) -> None:
    soaked(
        seed,
        20,
        spec,
        is_overlapped=is_overlapped,
        has_overflows=has_overflows,
        page_size=page_size,
        num_pages=-(-num_tokens // page_size),
        chunked_prefill_size=chunked_prefill_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=enable_prefix_caching,
    )
