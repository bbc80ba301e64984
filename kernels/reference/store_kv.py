"""Write this step's K and V into their slots."""

from torch import Tensor


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """k, v [T, Hkv, D] into k_cache, v_cache [S, Hkv, D] at out_cache_loc [T] int64.

    Slots are distinct, except that the dump slot 0 may repeat; it then holds any of its writers.
    """
    k_cache.index_copy_(0, out_cache_loc, k.to(k_cache.dtype))
    v_cache.index_copy_(0, out_cache_loc, v.to(v_cache.dtype))
