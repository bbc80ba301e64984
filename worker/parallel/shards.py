"""Which part of a model each rank of a group holds. Pure.

Knows sizes only: no tensor, no file.
"""

from dataclasses import dataclass

from paceline.worker.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """The half-open range start..stop of one dimension."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class HeadShard:
    """One rank's heads: `queries` of the query heads read `kvs` of the KV heads, evenly."""

    queries: Span
    kvs: Span


def split_evenly(size: int, num_parts: int, multiple: int = 1) -> tuple[Span, ...]:
    """Cuts `size` into consecutive spans of nearly equal length, the longer ones first.

    Cuts fall on multiples of `multiple` where `size` is one and each part gets some; a part may be
    empty only when there are more parts than units.
    """
    if size % multiple or size // multiple < num_parts:
        multiple = 1
    units, extra = divmod(size // multiple, num_parts)
    spans = []
    start = 0
    for part in range(num_parts):
        stop = start + (units + (part < extra)) * multiple
        spans.append(Span(start, stop))
        start = stop
    return tuple(spans)


def split_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> tuple[HeadShard, ...]:
    """The heads of each rank.

    Up to the KV heads, whole KV groups are split: 9/3 on 2 ranks is 6/2 + 3/1. Above them, each
    KV head is held by several ranks, which split the queries of its group: 9/3 on 4 ranks is
    2/1 + 1/1 + 3/1 + 3/1.

    Raises: ConfigError: more ranks than query heads, or query heads that KV heads cannot share.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ConfigError(
            f"the model has {num_heads} query heads and {num_kv_heads} KV heads; "
            "the first must be a multiple of the second"
        )
    if not 1 <= tp_size <= num_heads:
        raise ConfigError(
            f"tp_size is {tp_size}, but the model has {num_heads} query heads; "
            f"use a tp_size of 1 to {num_heads}"
        )
    group_size = num_heads // num_kv_heads
    if tp_size <= num_kv_heads:
        return tuple(
            HeadShard(Span(kvs.start * group_size, kvs.stop * group_size), kvs)
            for kvs in split_evenly(num_kv_heads, tp_size)
        )
    shards = []
    for kv_head, ranks in enumerate(split_evenly(tp_size, num_kv_heads)):
        first = kv_head * group_size
        for part in split_evenly(group_size, len(ranks)):
            queries = Span(first + part.start, first + part.stop)
            shards.append(HeadShard(queries, Span(kv_head, kv_head + 1)))
    return tuple(shards)
