"""SglKernels: sgl-kernel's ops where this build has them, Triton's for the rest.

Foreign names end in this folder; those of trees in trees.py.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet, TreeLinks, VerifyResult
from paceline.kernels.paged.kernel_set import TritonKernels
from paceline.kernels.sgl import trees
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
    get_draft_cache_locs = staticmethod(TritonKernels.get_draft_cache_locs)
    fill_accepted_out_cache_loc = staticmethod(TritonKernels.fill_accepted_out_cache_loc)
    filter_finished_cache_loc = staticmethod(TritonKernels.filter_finished_cache_loc)
    align_evict_mask_to_page_size = staticmethod(TritonKernels.align_evict_mask_to_page_size)
    alloc_extend = staticmethod(TritonKernels.alloc_extend)
    alloc_decode = staticmethod(TritonKernels.alloc_decode)
    plan_attention = staticmethod(TritonKernels.plan_attention)
    decode_attention = staticmethod(TritonKernels.decode_attention)
    extend_attention = staticmethod(TritonKernels.extend_attention)
    # Theirs of these two trust their input: one writes out of bounds where a parent is missing, the
    # other reads there where a draft's token is in no vocabulary, and needs scratch of
    # [bs, num_draft_tokens, V]. What they give for sound input is the same (tests/golden).
    build_tree = staticmethod(TritonKernels.build_tree)
    tree_speculative_sampling_target_only = staticmethod(
        TritonKernels.tree_speculative_sampling_target_only
    )
    build_tree_links = staticmethod(TritonKernels.build_tree_links)
    fill_new_verified_id = staticmethod(TritonKernels.fill_new_verified_id)
    create_extend_after_decode_spec_info = staticmethod(
        TritonKernels.create_extend_after_decode_spec_info
    )
    create_accept_length_filter = staticmethod(TritonKernels.create_accept_length_filter)
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
        return trees.verify_tree_greedy(draft_ids, links, target_ids, max_depth)

    def reconstruct_indices_from_tree_mask(
        self, tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int
    ) -> tuple[TreeLinks, Tensor]:
        if "reconstruct_indices_from_tree_mask" not in self._ops or len(seq_lens) == 0:
            return TritonKernels.reconstruct_indices_from_tree_mask(
                tree_mask, seq_lens, num_draft_tokens
            )
        return trees.reconstruct_indices_from_tree_mask(tree_mask, seq_lens, num_draft_tokens)

    def segment_packbits(
        self, x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor
    ) -> None:
        if "segment_packbits" not in self._ops or len(input_indptr) < 2:
            TritonKernels.segment_packbits(x, input_indptr, output_indptr, y)
        else:
            trees.segment_packbits(x, input_indptr, output_indptr, y)

    def top_k_renorm(self, probs: Tensor, top_k: Tensor) -> Tensor:
        if "top_k_renorm_prob" not in self._ops or probs.numel() == 0:
            return TritonKernels.top_k_renorm(probs, top_k)
        out: Tensor = self._sgl.top_k_renorm_prob(
            probs.contiguous(), top_k.clamp(max=probs.shape[1]).int()
        )
        return out

    def top_p_renorm(self, probs: Tensor, top_p: Tensor) -> Tensor:
        if "top_p_renorm_prob" not in self._ops or probs.numel() == 0:
            return TritonKernels.top_p_renorm(probs, top_p)
        out: Tensor = self._sgl.top_p_renorm_prob(probs.contiguous(), top_p)
        return out
