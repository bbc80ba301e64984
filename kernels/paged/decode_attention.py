"""One query per row over its slots, its keys shared out where rows are few."""

from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.paged.attend import LaunchPlan, attend, plan_attention


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """As the reference's `decode_attention`."""
    if not isinstance(plan, LaunchPlan):
        plan = plan_attention(None, kv_indptr, kv_indices)
    return attend(q, k_cache, v_cache, None, kv_indptr, kv_indices, None, None, scale, plan)
