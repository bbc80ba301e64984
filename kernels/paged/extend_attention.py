"""Many queries per row over its slots: causal, or under a tree mask."""

from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.paged.attend import LaunchPlan, attend, plan_attention


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
    """As the reference's `extend_attention`; without a plan, one sync for the longest row."""
    if not isinstance(plan, LaunchPlan):
        plan = plan_attention(qo_indptr, kv_indptr, kv_indices)
    return attend(
        q,
        k_cache,
        v_cache,
        qo_indptr,
        kv_indptr,
        kv_indices,
        tree_mask,
        mask_indptr,
        scale,
        plan,
    )
