"""Self-attention: projections around the kernel set's rotary, store and paged attention."""

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import AttentionRows, Batch
from paceline.worker.layers.linear import Linear
from paceline.worker.parallel.shards import HeadShard


class Attention:
    """One layer's attention over this rank's heads."""

    def __init__(
        self, qkv: Linear, o_proj: Linear, heads: HeadShard, head_dim: int, kernels: KernelSet
    ) -> None:
        self._qkv = qkv
        self._o_proj = o_proj
        self._num_heads = len(heads.queries)
        self._num_kv_heads = len(heads.kvs)
        self._head_dim = head_dim
        self._split = [self._num_heads, self._num_kv_heads, self._num_kv_heads]
        self._scale = head_dim**-0.5
        self._kernels = kernels

    def __call__(
        self, x: Tensor, cos_sin: Tensor, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """x [T, hidden], cos_sin [T, head_dim] of the batch's positions -> [T, hidden]."""
        kernels = self._kernels
        num_q, num_kv = self._num_heads, self._num_kv_heads
        qkv = self._qkv(x).view(-1, num_q + 2 * num_kv, self._head_dim)
        # Not torch.split: it is a Python function, which takes three times as long.
        q, k, v = qkv.split_with_sizes(self._split, dim=1)
        q, k = kernels.apply_rotary(q, k, cos_sin, None)
        kernels.store_kv(k, v, k_cache, v_cache, batch.out_cache_loc)
        if batch.extend is None:
            assert batch.decode is not None
            out = self._decode(q, k_cache, v_cache, batch.decode)
        elif batch.decode is None:
            out = self._extend(q, k_cache, v_cache, batch.extend)
        else:
            cut = batch.decode.stop
            out = torch.cat(
                [
                    self._decode(q[:cut], k_cache, v_cache, batch.decode),
                    self._extend(q[cut:], k_cache, v_cache, batch.extend),
                ]
            )
        return self._o_proj(out.reshape(-1, num_q * self._head_dim))

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows) -> Tensor:
        return self._kernels.decode_attention(
            q, k_cache, v_cache, rows.kv_indptr, rows.kv_indices, self._scale, rows.plan
        )

    def _extend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows) -> Tensor:
        assert rows.qo_indptr is not None
        return self._kernels.extend_attention(
            q,
            k_cache,
            v_cache,
            rows.qo_indptr,
            rows.kv_indptr,
            rows.kv_indices,
            rows.tree_mask,
            rows.mask_indptr,
            self._scale,
            rows.plan,
        )
