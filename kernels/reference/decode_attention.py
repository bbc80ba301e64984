"""One query per row over its slots."""

from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.reference.attend import RowPlan, attend, plan_attention


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """q [bs, Hq, D] over each row's kv_indices -> [bs, Hq, D]; a row without keys gives 0.

    Query head h reads KV head h // (Hq // Hkv); softmax(scale * q k) in fp32.
    """
    if not isinstance(plan, RowPlan):
        plan = plan_attention(None, kv_indptr, kv_indices, None, None)
    return attend(q, k_cache, v_cache, plan, scale)
