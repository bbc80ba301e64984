"""Many queries per row over its slots: causal, or under a tree mask."""

from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.reference.attend import RowPlan, attend, plan_attention


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
    """q [T, Hq, D] -> [T, Hq, D]; row b's keys are all its tokens, this step's last.

    A row without mask cells is causal, aligned at the end: query i of q_len sees all keys but the
    last q_len - 1 - i. Otherwise its cells [q_len, tree_len] say which of the last tree_len keys
    each query sees; it sees every key before them.
    """
    if not isinstance(plan, RowPlan):
        plan = plan_attention(qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr)
    return attend(q, k_cache, v_cache, plan, scale)
