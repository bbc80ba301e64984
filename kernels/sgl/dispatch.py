"""SglKernels: sgl-kernel's ops where this build has them, Triton's for the rest.

Foreign names and spellings end here: `retrive_*`, and results in int32.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet, TreeLinks, VerifyResult
from paceline.kernels.paged.kernel_set import TritonKernels
from paceline.kernels.sgl.capabilities import probe_ops

_HALF = (torch.float16, torch.bfloat16)  # the dtypes its norms and activations are built for


class SglKernels(KernelSet):
    """Serves CUDA; an op gives the same whichever library runs it, up to the last bits of bf16."""

    name = "sgl"

    apply_rotary = staticmethod(TritonKernels.apply_rotary)
    store_kv = staticmethod(TritonKernels.store_kv)
    move_kv = staticmethod(TritonKernels.move_kv)
    create_kv_indices = staticmethod(TritonKernels.create_kv_indices)
    generate_draft_decode_kv_indices = staticmethod(TritonKernels.generate_draft_decode_kv_indices)
    assign_req_to_token_pool = staticmethod(TritonKernels.assign_req_to_token_pool)
    assign_extend_cache_locs = staticmethod(TritonKernels.assign_extend_cache_locs)
    assign_draft_cache_locs = staticmethod(TritonKernels.assign_draft_cache_locs)
    get_src_tgt_cache_loc = staticmethod(TritonKernels.get_src_tgt_cache_loc)
    alloc_extend = staticmethod(TritonKernels.alloc_extend)
    alloc_decode = staticmethod(TritonKernels.alloc_decode)
    plan_attention = staticmethod(TritonKernels.plan_attention)
    decode_attention = staticmethod(TritonKernels.decode_attention)
    extend_attention = staticmethod(TritonKernels.extend_attention)
    build_tree_links = staticmethod(TritonKernels.build_tree_links)
    noise_bits = staticmethod(TritonKernels.noise_bits)

    def __init__(self) -> None:
        import sgl_kernel

        self._ops = probe_ops()
        self._sgl: Any = sgl_kernel  # untyped library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if "rmsnorm" not in self._ops or x.dtype not in _HALF:
            return TritonKernels.rms_norm(x, weight, eps)
        out: Tensor = self._sgl.rmsnorm(x, weight, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if "fused_add_rmsnorm" not in self._ops or x.dtype not in _HALF:
            return TritonKernels.add_rms_norm(x, residual, weight, eps)
        self._sgl.fused_add_rmsnorm(x, residual, weight, eps)  # both in place
        return x, residual

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        # Its loads are 16 bytes wide.
        is_aligned = gate_up.shape[-1] // 2 * gate_up.element_size() % 16 == 0
        usable = gate_up.dtype in _HALF and is_aligned and gate_up.is_contiguous()
        if "silu_and_mul" not in self._ops or not usable:
            return TritonKernels.silu_and_mul(gate_up)
        out: Tensor = self._sgl.silu_and_mul(gate_up)
        return out

    def verify_tree_greedy(
        self, draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
    ) -> VerifyResult:
        if "verify_tree_greedy" not in self._ops or len(draft_ids) == 0:
            return TritonKernels.verify_tree_greedy(draft_ids, links, target_ids, max_depth)
        bs, num_nodes = draft_ids.shape
        device = draft_ids.device
        predict = torch.zeros(bs * num_nodes, dtype=torch.int32, device=device)
        accept_index = torch.full((bs, max_depth + 1), -1, dtype=torch.int32, device=device)
        accept_length = torch.zeros(bs, dtype=torch.int32, device=device)
        self._sgl.verify_tree_greedy(
            predicts=predict,
            accept_index=accept_index,
            accept_token_num=accept_length,
            candidates=draft_ids.contiguous(),
            retrive_index=links.retrieve_index,
            retrive_next_token=links.retrieve_next_token,
            retrive_next_sibling=links.retrieve_next_sibling,
            target_predict=target_ids.contiguous(),
        )
        return VerifyResult(predict.long(), accept_index.long(), accept_length.long())
