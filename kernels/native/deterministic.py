"""DeterministicNative: the native set, with a row's result free of the rows beside it.

The compiled ops sum in an order that a row alone decides. What is left is the attention of many
queries: here each of them, a prompt's or a tree's, is a row of its own over the keys that it sees,
in the order in which plain decoding has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.native import ops
from paceline.kernels.native.kernel_set import NativeKernels
from paceline.kernels.reference.deterministic import DeterministicReference


class DeterministicNative(NativeKernels):
    """What no compiled op takes runs as in the deterministic reference set."""

    silu_and_mul = staticmethod(DeterministicReference.silu_and_mul)

    @staticmethod
    def plan_attention(  # type: ignore[override]  # each set has a plan of its own
        qo_indptr: Tensor | None,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        tree_mask: Tensor | None = None,
        mask_indptr: Tensor | None = None,
        *,
        q_lens: Sequence[int] | None = None,
        kv_lens: Sequence[int] | None = None,
    ) -> "QueryPlan | None":
        """Lengths are read from the tensors; a decode has nothing to plan."""
        if qo_indptr is None:
            return None
        return plan_queries(qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr)

    @staticmethod
    def decode_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        if not ops.can_attend(q, k_cache, v_cache):
            return DeterministicReference.decode_attention(
                q, k_cache, v_cache, kv_indptr, kv_indices, scale
            )
        return ops.decode_attention(q, k_cache, v_cache, kv_indptr, kv_indices, scale)

    @staticmethod
    def extend_attention(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        tree_mask: Tensor | None,
        mask_indptr: Tensor | None,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        if not ops.can_attend(q, k_cache, v_cache):
            return DeterministicReference.extend_attention(
                q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr,
                scale,
            )  # fmt: skip
        if not isinstance(plan, QueryPlan):
            plan = plan_queries(qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr)
        return ops.decode_attention(q, k_cache, v_cache, plan.kv_indptr, plan.kv_indices, scale)


@dataclass(frozen=True, slots=True)
class QueryPlan(AttentionPlan):
    """The keys of each query, as decode_attention takes those of a row."""

    kv_indptr: Tensor
    kv_indices: Tensor


def plan_queries(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None,
    mask_indptr: Tensor | None,
) -> QueryPlan:
    """Arguments as `KernelSet.plan_attention`; a prompt takes 4 bytes per query and key."""
    slots = kv_indices.numpy()
    kv_starts = kv_indptr.tolist()
    cell_starts = [0] * len(kv_starts)
    if tree_mask is not None and mask_indptr is not None:
        cell_starts = mask_indptr.tolist()
    keys = []
    for b, (q_start, q_stop) in enumerate(pairwise(qo_indptr.tolist())):
        own, q_len = slots[kv_starts[b] : kv_starts[b + 1]], q_stop - q_start
        if cell_starts[b] < cell_starts[b + 1]:
            assert tree_mask is not None
            cells = tree_mask[cell_starts[b] : cell_starts[b + 1]].numpy().reshape(q_len, -1)
            prefix_len = len(own) - cells.shape[1]
            prefix, nodes = own[:prefix_len], own[prefix_len:]
            keys += [np.concatenate([prefix, nodes[seen]]) for seen in cells]
        else:
            keys += [own[: len(own) - q_len + 1 + i] for i in range(q_len)]
    lens = [0, *(len(some) for some in keys)]
    return QueryPlan(
        torch.from_numpy(np.cumsum(lens, dtype=np.int32)),
        torch.from_numpy(np.concatenate(keys)) if keys else kv_indices[:0],
    )
