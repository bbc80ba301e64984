"""How heads and widths are split over ranks, evenly or not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.errors import ConfigError
from paceline.worker.parallel.shards import HeadShard, Span, split_evenly, split_heads


@given(st.integers(1, 5000), st.integers(1, 16), st.sampled_from([1, 32, 64]))
def test_spans_cover_a_dimension_once_and_nearly_evenly(
    size: int, num_parts: int, multiple: int
) -> None:
    spans = split_evenly(size, num_parts, multiple)
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(size))
    assert len(spans) == num_parts
    unit = multiple if size % multiple == 0 and size // multiple >= num_parts else 1
    assert max(map(len, spans)) - min(map(len, spans)) <= unit
    assert min(map(len, spans)) > 0 or size < num_parts


def test_smollm2_on_two_ranks_is_six_two_and_three_one() -> None:
    assert split_heads(9, 3, 2) == (
        HeadShard(Span(0, 6), Span(0, 2)),
        HeadShard(Span(6, 9), Span(2, 3)),
    )


def test_ranks_above_the_kv_heads_share_a_kv_head_and_split_its_queries() -> None:
    assert split_heads(9, 3, 4) == (
        HeadShard(Span(0, 2), Span(0, 1)),
        HeadShard(Span(2, 3), Span(0, 1)),
        HeadShard(Span(3, 6), Span(1, 2)),
        HeadShard(Span(6, 9), Span(2, 3)),
    )


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_every_query_head_is_once_with_the_kv_head_it_reads(
    num_kv_heads: int, group_size: int, data: st.DataObject
) -> None:
    num_heads = num_kv_heads * group_size
    shards = split_heads(num_heads, num_kv_heads, data.draw(st.integers(1, num_heads)))
    queries = [q for shard in shards for q in range(shard.queries.start, shard.queries.stop)]
    assert queries == list(range(num_heads))
    for shard in shards:
        # A kernel gives local query i the local KV head i // (queries / KV heads).
        repeats, rest = divmod(len(shard.queries), len(shard.kvs))
        assert rest == 0
        for i, query in enumerate(range(shard.queries.start, shard.queries.stop)):
            assert shard.kvs.start + i // repeats == query // group_size


@pytest.mark.parametrize("tp_size", [0, 10])
def test_more_ranks_than_query_heads_is_a_config_error_that_says_the_limit(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"tp_size is {tp_size}.*9 query heads.*1 to 9"):
        split_heads(9, 3, tp_size)


def test_query_heads_that_kv_heads_cannot_share_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match="7 query heads and 2 KV heads"):
        split_heads(7, 2, 1)
