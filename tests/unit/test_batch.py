"""Plans to device tensors: slots, positions, masks, and which rows of logits are wanted."""

import pytest
import torch

from paceline.kernels.registry import load_kernels
from paceline.worker.batch import Batch, build_batch
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.step import Phase, ReqStep, StepPlan
from tests.plans import Row, make_rows, plan

KERNELS = load_kernels("reference", "cpu")


def build(step_plan: StepPlan, page_size: int = 4) -> tuple[Batch, ReqToToken]:
    table = ReqToToken(5, 64, page_size, "cpu")
    return build_batch(step_plan, table, KERNELS), table


def test_pages_become_slots_of_the_row_from_the_page_they_start_at() -> None:
    row = ReqStep(2, Phase.PREFILL, 4, (7, 8, 9), page_start=1, pages=(5,))
    batch, table = build(plan(row))
    assert table.host[2, 4:8].tolist() == [20, 21, 22, 23]
    assert batch.out_cache_loc.tolist() == [20, 21, 22]
    assert batch.input_ids.tolist() == [7, 8, 9]
    assert batch.positions.tolist() == [4, 5, 6]


def test_rows_of_one_query_decode_and_the_rest_extend() -> None:
    a, b, c = make_rows(3, 30, 4)
    build_first = [row.step(range(n)) for row, n in ((a, 5), (b, 3))]
    table = ReqToToken(5, 64, 4, "cpu")
    build_batch(plan(*build_first), table, KERNELS)
    decodes = [a.step([1], Phase.DECODE), b.step([2], Phase.VERIFY, parents=(-1,))]
    batch = build_batch(plan(*decodes, c.step([3, 4, 5, 6])), table, KERNELS)
    assert batch.decode is not None
    assert (batch.decode.start, batch.decode.stop, batch.decode.qo_indptr) == (0, 2, None)
    assert batch.decode.kv_indptr.tolist() == [0, 6, 10]
    assert batch.decode.kv_indices.tolist() == [*table.host[0, :6], *table.host[1, :4]]
    assert batch.extend is not None
    assert (batch.extend.start, batch.extend.stop) == (2, 6)
    assert batch.extend.qo_indptr is not None
    assert batch.extend.qo_indptr.tolist() == [0, 4]
    assert batch.extend.kv_indices.tolist() == table.host[2, :4].tolist()
    assert batch.extend.tree_mask is None


def test_a_tree_sees_its_ancestors_and_stands_at_their_depth() -> None:
    row = ReqStep(0, Phase.VERIFY, 2, (1, 2, 3, 4), pages=(1, 2), parents=(-1, 0, 0, 1))
    batch, _ = build(plan(row))
    assert batch.positions.tolist() == [2, 3, 3, 4]
    assert batch.extend is not None
    assert batch.extend.tree_mask is not None
    assert batch.extend.tree_mask.view(4, 4).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 0, 1, 0],
        [1, 1, 0, 1],
    ]


def test_new_nodes_of_a_grown_tree_see_the_cached_ones_they_descend_from() -> None:
    row = ReqStep(
        0, Phase.DRAFT, 1, (8, 9), pages=(1, 2), parents=(-1, -1, 0, 1), num_cached_nodes=2
    )
    batch, table = build(plan(row))
    assert batch.positions.tolist() == [2, 2]
    assert batch.out_cache_loc.tolist() == table.host[0, 3:5].tolist()
    assert batch.extend is not None
    assert batch.extend.tree_mask is not None
    assert batch.extend.tree_mask.view(2, 4).int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_a_chain_needs_no_mask_and_mixes_with_trees() -> None:
    chain = ReqStep(0, Phase.VERIFY, 0, (1, 2, 3), pages=(1,), parents=(-1, 0, 1))
    tree = ReqStep(1, Phase.VERIFY, 0, (1, 2, 3), pages=(2,), parents=(-1, 0, 0))
    batch, _ = build(plan(chain, tree))
    assert batch.extend is not None
    assert batch.extend.mask_indptr is not None
    assert batch.extend.mask_indptr.tolist() == [0, 0, 9]
    only_chain, _ = build(plan(chain))
    assert only_chain.extend is not None
    assert only_chain.extend.tree_mask is None


@pytest.mark.parametrize(
    ("num_logits", "wanted"),
    [((-1, -1), None), ((1, 3), None), ((1, 0), [0]), ((0, 2), [2, 3]), ((0, 0), [])],
)
def test_logits_are_taken_of_the_last_tokens_of_each_row(
    num_logits: tuple[int, int], wanted: list[int] | None
) -> None:
    first = ReqStep(0, Phase.DECODE, 0, (1,), pages=(1,), num_logits=num_logits[0])
    second = ReqStep(1, Phase.PREFILL, 0, (2, 3, 4), pages=(2,), num_logits=num_logits[1])
    batch, _ = build(plan(first, second))
    got = None if batch.logit_indices is None else batch.logit_indices.tolist()
    assert got == wanted


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_are_laid_out_alike_at_every_page_size(page_size: int) -> None:
    row = Row(1, list(range(1, 40)), page_size)
    table = ReqToToken(2, 64, page_size, "cpu")
    for length in (5, 1, 20):
        batch = build_batch(plan(row.step(range(length))), table, KERNELS)
        assert batch.input_ids.dtype == batch.positions.dtype == torch.int64
        assert batch.positions.tolist() == list(range(row.kv_len - length, row.kv_len))
    slots = table.host[1, : row.kv_len].tolist()
    assert len(set(slots)) == row.kv_len
    assert min(slots) >= page_size


@pytest.mark.parametrize(
    "row",
    [
        ReqStep(5, Phase.PREFILL, 0, (1,), pages=(1,)),  # no such row
        ReqStep(0, Phase.PREFILL, 0, (1,) * 5, pages=(1,)),  # the fifth token has no slot
        ReqStep(0, Phase.PREFILL, 62, (1, 2, 3)),  # beyond the row's end
        ReqStep(0, Phase.PREFILL, 0, (1,), page_start=16, pages=(1,)),
        ReqStep(0, Phase.VERIFY, 0, (1, 2), pages=(1,), parents=(-1, 1)),  # its own parent
        ReqStep(0, Phase.VERIFY, 0, (1, 2), pages=(1,), parents=(-1,)),
        ReqStep(0, Phase.PREFILL, 0, (1,), pages=(1,), num_logits=2),
        ReqStep(0, Phase.PREFILL, 0, ()),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_is_computed(row: ReqStep) -> None:
    with pytest.raises(AssertionError):
        build(plan(row))
