"""Spec-info payloads: rows follow their reqs, whatever is filtered and merged."""

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.worker.spec import draft_input
from paceline.worker.spec.draft_input import EagleDraftInput
from paceline.worker.spec.spec_info import CaptureHiddenMode, EagleVerifyInput

TOPK, HIDDEN = 2, 3
SYNC, EXTEND, OVERLAPPED = "sync", "extend", "overlapped"


@dataclass(frozen=True)
class Record:
    """One req: every value of it is a function of its row, so that a stranger's shows."""

    row: int
    num_tokens: int  # in the draft extend
    extends: bool


def build(records: list[Record], mode: str) -> EagleDraftInput:
    rows = [record.row for record in records]
    ids = torch.tensor(rows, dtype=torch.int64)
    base = EagleDraftInput(
        req_pool_indices=ids,
        req_pool_indices_cpu=tuple(rows),
        allocate_lens=ids + 100,
        new_seq_lens=ids + 200,
        accept_length=(ids % 4).to(torch.int32),
        accept_length_cpu=tuple(row % 4 for row in rows),
    )
    if mode == OVERLAPPED:
        return base
    per_req = ids[:, None].float()
    base = replace(
        base,
        topk_p=per_req / torch.tensor([100.0, 200.0]),
        topk_index=ids[:, None] * 10 + torch.arange(TOPK),
    )
    lens = [1] * len(rows)
    if mode == EXTEND:
        lens = [record.num_tokens if record.extends else 0 for record in records]
        due = [record.row for record in records if record.extends]
        base = replace(
            base,
            extend_lens_cpu=tuple(lens),
            # Both are flat over the tokens of an extend: set with its lengths.
            req_pool_indices_for_draft_extend=torch.tensor(due, dtype=torch.int64),
            req_pool_indices_for_draft_extend_cpu=tuple(due),
            seq_lens_for_draft_extend=torch.tensor(due, dtype=torch.int64) + 300,
            seq_lens_for_draft_extend_cpu=tuple(row + 300 for row in due),
        )
    tokens = [4 * row + j for row, num in zip(rows, lens, strict=True) for j in range(num)]
    flat = torch.tensor(tokens, dtype=torch.int64)
    num_positions = lens if mode == EXTEND else [TOPK] * len(rows)
    positions = [
        9 * row + j for row, num in zip(rows, num_positions, strict=True) for j in range(num)
    ]
    return replace(
        base,
        verified_id=flat,
        # Exact in bfloat16: no token's value reaches 256.
        hidden_states=flat[:, None].expand(-1, HIDDEN).to(torch.bfloat16),
        positions=torch.tensor(positions, dtype=torch.int64),
    )


def assert_same(got: EagleDraftInput, want: EagleDraftInput) -> None:
    for field in fields(EagleDraftInput):
        mine: Any = getattr(got, field.name)
        theirs: Any = getattr(want, field.name)
        if isinstance(theirs, torch.Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert mine.device == theirs.device, field.name
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


@pytest.mark.parametrize("mode", [SYNC, EXTEND, OVERLAPPED])
@settings(max_examples=40, deadline=None, database=None)
@given(data=st.data())
def test_any_filters_and_merges_equal_the_same_on_a_list_of_reqs(
    mode: str, data: st.DataObject
) -> None:
    fresh = iter(range(1, 60))

    def draw_records() -> list[Record]:
        num = data.draw(st.integers(0, 4))
        return [
            Record(next(fresh), data.draw(st.integers(1, 4)), data.draw(st.booleans()))
            for _ in range(num)
        ]

    records = draw_records()
    spec = build(records, mode)
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            order = data.draw(st.permutations(records))
            records = order[: data.draw(st.integers(0, len(order)))]
            spec = spec.filter_batch([record.row for record in records])
            if mode == EXTEND:  # the reqs that a draft extend is due for keep the batch's order
                assert spec.req_pool_indices_for_draft_extend_cpu == tuple(
                    record.row for record in records if record.extends
                )
        else:
            more = draw_records()
            spec = spec.merge_batch(build(more, mode))
            records = records + more
        assert_same(spec, build(records, mode))


@pytest.mark.parametrize("mode", [SYNC, EXTEND, OVERLAPPED])
def test_filter_then_merge_leaves_the_rows_that_stay_and_those_that_came(mode: str) -> None:
    """Reqs 10, 11, 12; 11 finishes, 13 joins."""
    r0, r1, r2, r3 = (Record(row, 2, extends=True) for row in (10, 11, 12, 13))
    merged = build([r0, r1, r2], mode).filter_batch([10, 12]).merge_batch(build([r3], mode))
    assert_same(merged, build([r0, r2, r3], mode))
    assert merged.req_pool_indices.tolist() == [10, 12, 13]


def test_every_field_follows_its_req_or_is_known_not_to() -> None:
    followed = (
        draft_input._ROW_TENSORS
        + draft_input._ROW_TUPLES
        + draft_input._TOKEN_TENSORS
        + draft_input._EXTEND_TENSORS
        + draft_input._EXTEND_TUPLES
        + ("positions",)
    )
    others = ("capture_hidden_mode", "verify_done", "kv_indptr", "kv_indices")
    assert sorted(followed + others) == sorted(f.name for f in fields(EagleDraftInput))


def test_metadata_of_one_forward_does_not_outlive_its_batch() -> None:
    whole = replace(
        build([Record(1, 1, extends=True), Record(2, 1, extends=True)], SYNC),
        kv_indptr=torch.zeros(5, dtype=torch.int32),
        kv_indices=torch.zeros(8, dtype=torch.int64),
    )
    idle = EagleDraftInput.create_idle_input(
        hidden_size=HIDDEN, topk=TOPK, dtype=torch.bfloat16, device="cpu"
    )
    for changed in (whole.filter_batch([2]), whole.merge_batch(idle), idle.merge_batch(whole)):
        assert changed.kv_indptr is None
        assert changed.kv_indices is None


def test_a_req_that_is_not_there_or_there_twice_is_an_error() -> None:
    spec = build([Record(1, 1, extends=True), Record(2, 1, extends=True)], SYNC)
    with pytest.raises(ValueError, match=r"rows \[3\] are not among \(1, 2\)"):
        spec.filter_batch([1, 3])
    with pytest.raises(ValueError, match="twice"):
        spec.filter_batch([1, 1])
    with pytest.raises(ValueError, match="twice"):
        spec.merge_batch(build([Record(2, 1, extends=True)], SYNC))


@pytest.mark.parametrize(
    "name",
    [
        "req_pool_indices",
        "verified_id",
        "topk_p",
        "topk_index",
        "hidden_states",
        "accept_length",
        "accept_length_cpu",
        "allocate_lens",
        "new_seq_lens",
        "positions",
    ],
)
def test_a_field_of_another_row_set_is_an_error(name: str) -> None:
    spec = build([Record(row, 1, extends=True) for row in (1, 2, 3)], SYNC)
    with pytest.raises(ValueError, match=f"{name} has . entries"):
        replace(spec, **{name: getattr(spec, name)[:-1]})


def test_a_draft_extend_of_reqs_outside_the_batch_is_an_error() -> None:
    spec = build([Record(1, 2, extends=True), Record(2, 3, extends=False)], EXTEND)
    with pytest.raises(ValueError, match="is not one of rows"):
        replace(spec, req_pool_indices_for_draft_extend_cpu=(5,))
    with pytest.raises(ValueError, match="verified_id has 2 entries"):
        replace(spec, extend_lens_cpu=(1, 0))


def test_sides_that_do_not_fit_do_not_merge() -> None:
    one, two = build([Record(1, 1, extends=True)], SYNC), build([Record(2, 1, extends=True)], SYNC)
    with pytest.raises(ValueError, match="on one side only"):
        one.merge_batch(build([Record(2, 1, extends=True)], OVERLAPPED))
    with pytest.raises(ValueError, match="verified_id of"):
        one.merge_batch(replace(two, verified_id=torch.tensor([5], dtype=torch.int32)))
    with pytest.raises(ValueError, match="hidden_states of"):
        one.merge_batch(replace(two, hidden_states=torch.zeros(1, 9, dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match="unequal numbers"):
        one.merge_batch(replace(two, positions=torch.tensor([5])))
    with pytest.raises(ValueError, match="do not merge"):
        one.merge_batch(replace(two, capture_hidden_mode=CaptureHiddenMode.LAST))


def test_a_merge_waits_for_the_verifications_of_both_sides() -> None:
    class Event:
        def synchronize(self) -> None:
            """Reached."""

    first, second = Event(), Event()
    one = replace(build([Record(1, 1, extends=True)], OVERLAPPED), verify_done=(first,))
    two = replace(build([Record(2, 1, extends=True)], OVERLAPPED), verify_done=(first, second))
    assert one.merge_batch(two).verify_done == (first, second)
    assert two.filter_batch([2]).verify_done == (first, second)


@pytest.mark.parametrize("mode", [SYNC, EXTEND, OVERLAPPED])
def test_an_idle_input_adds_no_row(mode: str) -> None:
    idle = EagleDraftInput.create_idle_input(
        hidden_size=HIDDEN, topk=TOPK, dtype=torch.bfloat16, device="cpu"
    )
    assert idle.bs == 0
    assert idle.topk_p is not None
    assert idle.topk_p.shape == (0, TOPK)
    assert idle.hidden_states is not None
    assert idle.hidden_states.shape == (0, HIDDEN)
    assert idle.hidden_states.dtype == torch.bfloat16
    assert idle.accept_length is not None
    assert idle.accept_length.dtype == torch.int32
    assert idle.filter_batch([]).bs == 0
    spec = build([Record(1, 2, extends=True), Record(2, 1, extends=False)], mode)
    assert_same(idle.merge_batch(spec), spec)
    assert_same(spec.merge_batch(idle), spec)


def test_new_tokens_count_the_bonus_and_leave_accept_length_alone() -> None:
    spec = build([Record(2, 1, extends=True), Record(4, 1, extends=True)], SYNC)
    assert spec.num_new_tokens is not None
    assert spec.num_new_tokens.tolist() == [3, 1]
    assert spec.accept_length is not None
    assert spec.accept_length.tolist() == [2, 0]


def test_a_verify_input_holds_what_its_links_imply() -> None:
    links = torch.arange(6).view(2, 3)
    verify = EagleVerifyInput(
        draft_token=torch.arange(6),
        custom_mask=torch.ones(18, dtype=torch.bool),
        positions=torch.arange(6),
        retrieve_index=links,
        retrieve_next_token=links,
        retrieve_next_sibling=links,
        num_steps=2,
        topk=1,
        num_draft_tokens=3,
    )
    assert verify.bs == 2
    assert verify.links.retrieve_index is links
    for name, value in [
        ("draft_token", torch.arange(5)),
        ("positions", torch.arange(7)),
        ("hidden_states", torch.zeros(2, 4)),
        ("seq_lens_cpu", torch.arange(3)),
        ("last_loc", torch.arange(1)),
        ("retrieve_next_sibling", links[:1]),
    ]:
        with pytest.raises(ValueError, match=name):
            replace(verify, **{name: value})


def test_an_idle_verify_input_has_no_node_and_captures_all() -> None:
    idle = EagleVerifyInput.create_idle_input(num_steps=2, topk=4, num_draft_tokens=8, device="cpu")
    assert idle.bs == 0
    assert len(idle.draft_token) == 0
    assert idle.retrieve_index.shape == (0, 8)
    assert idle.custom_mask.dtype == torch.bool
    assert idle.capture_hidden_mode is CaptureHiddenMode.FULL
