"""Copy KV from slot to slot, as when accepted tree nodes move into line."""

from collections.abc import Sequence

from torch import Tensor


def move_kv(caches: Sequence[Tensor], src: Tensor, tgt: Tensor) -> None:
    """cache[tgt] = cache[src] for each cache [S, Hkv, D]; src, tgt [n] int64, tgt distinct.

    All of src is read before tgt is written, so the two may overlap.
    """
    for cache in caches:
        cache.index_copy_(0, tgt, cache.index_select(0, src))
