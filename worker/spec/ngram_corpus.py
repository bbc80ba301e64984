"""Corpus: texts known beforehand, and what follows in them after given words. No model, no file.

Built once and never changed, so that any number of drafters may share one. Every place of the texts
is sorted by the tokens before it, the nearest first: the places of the longest common past lie side
by side and are found by halving. Pure host values.
"""

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_END = 0xFFFFFFFF  # stands behind each text; no vocabulary has it
_ID_BYTES = 4


class Found(NamedTuple):
    """Where the last words stood before."""

    past_len: int  # tokens that the past of each place has in common with what was asked for
    next_ids: list[list[int]]  # what follows at each place, never empty


class Corpus:
    """Keeps 12 bytes per token; while it is built about 80."""

    def __init__(self, texts: Iterable[Sequence[int]], window: int = 12) -> None:
        """
        Args:
            texts: token ids; no past and no continuation reaches from one text into another.
            window: a common past counts up to this many tokens.
        """
        ids = array("I")
        for text in texts:
            ids.extend(text)
            ids.append(_END)
        backwards = np.array(ids[::-1], dtype=np.int64)
        order = _sort_places(backwards, window)
        # Of no use are places behind nothing and those that nothing follows.
        order = order[(backwards[order] != _END) & (backwards[order - 1] != _END)]
        self._window = window
        self._ids = ids
        # Bytes of the highest first compare as the ids do.
        self._backwards = backwards.astype(">u4").tobytes()
        self._order = array("I", order.astype(np.uint32).tobytes())

    @property
    def num_tokens(self) -> int:
        return len(self._ids) - self._ids.count(_END)

    def find(self, ids: Sequence[int], *, min_len: int, max_places: int, max_next: int) -> Found:
        """The places whose past has the most of the last tokens of `ids`.

        Args:
            min_len: a shorter common past is none.
            max_places: of more, so many are taken at even distances.
            max_next: tokens of each continuation at most.
        """
        order = self._order
        past = _pack_past(ids, self._window)
        at = bisect_left(order, past, key=self._past)
        size = max(
            (_common_size(past, self._past(place)) for place in order[max(at - 1, 0) : at + 1]),
            default=0,
        )
        past_len = size // _ID_BYTES
        if past_len < max(min_len, 1):
            return Found(past_len, [])
        common = past[:size]
        first = bisect_left(order, common, hi=at, key=self._past)
        last = bisect_right(order, common, lo=at, key=lambda place: self._past(place)[:size])
        num_places = min(last - first, max_places)
        chosen = [order[first + i * (last - first) // num_places] for i in range(num_places)]
        return Found(past_len, [self._next(place, max_next) for place in chosen])

    def _past(self, place: int) -> bytes:
        start = place * _ID_BYTES
        return self._backwards[start : start + self._window * _ID_BYTES]

    def _next(self, place: int, max_next: int) -> list[int]:
        start = len(self._ids) - place
        found = self._ids[start : start + max_next].tolist()
        return found[: found.index(_END)] if _END in found else found


def _sort_places(backwards: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Sorts places by the `window` tokens from each on, or some more.

    Args:
        backwards: [n] token ids, the last first. A place is an index into it.
    Returns: [n] places; those of equal pasts in their order.
    Source: prefix doubling, Manber and Myers 1993.
    """
    rank = np.unique(backwards, return_inverse=True)[1]  # [n] by the first token
    num_sorted = 1
    while num_sorted < window:
        after = np.zeros_like(rank)  # [n] rank of what follows those; 0: nothing
        after[:-num_sorted] = rank[num_sorted:] + 1
        rank = np.unique(rank * (rank.size + 1) + after, return_inverse=True)[1]
        num_sorted *= 2
    return np.argsort(rank, kind="stable")


def _pack_past(ids: Sequence[int], window: int) -> bytes:
    last = ids[-window:]
    return struct.pack(f">{len(last)}I", *reversed(last))


def _common_size(one: bytes, other: bytes) -> int:
    """Bytes of the whole ids with which both begin."""
    most = min(len(one), len(other))
    size = 0
    while size < most and one[size : size + _ID_BYTES] == other[size : size + _ID_BYTES]:
        size += _ID_BYTES
    return size
