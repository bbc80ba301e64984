"""ReferenceKernels: every op in plain torch, the specification and what serves on a CPU."""

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.act import silu_and_mul
from paceline.kernels.reference.alloc import alloc_decode, alloc_extend
from paceline.kernels.reference.attend import plan_attention
from paceline.kernels.reference.build_tree import build_tree_links
from paceline.kernels.reference.cache_locs import (
    assign_draft_cache_locs,
    assign_extend_cache_locs,
    assign_req_to_token_pool,
    get_src_tgt_cache_loc,
)
from paceline.kernels.reference.decode_attention import decode_attention
from paceline.kernels.reference.extend_attention import extend_attention
from paceline.kernels.reference.kv_indices import (
    create_kv_indices,
    generate_draft_decode_kv_indices,
)
from paceline.kernels.reference.move_kv import move_kv
from paceline.kernels.reference.noise import noise_bits
from paceline.kernels.reference.norm import add_rms_norm, rms_norm
from paceline.kernels.reference.rope import apply_rotary
from paceline.kernels.reference.store_kv import store_kv
from paceline.kernels.reference.verify_tree import verify_tree_greedy


class ReferenceKernels(KernelSet):
    """The functions of this folder, unchanged."""

    name = "reference"

    rms_norm = staticmethod(rms_norm)
    add_rms_norm = staticmethod(add_rms_norm)
    apply_rotary = staticmethod(apply_rotary)
    silu_and_mul = staticmethod(silu_and_mul)
    store_kv = staticmethod(store_kv)
    move_kv = staticmethod(move_kv)
    create_kv_indices = staticmethod(create_kv_indices)
    generate_draft_decode_kv_indices = staticmethod(generate_draft_decode_kv_indices)
    assign_req_to_token_pool = staticmethod(assign_req_to_token_pool)
    assign_extend_cache_locs = staticmethod(assign_extend_cache_locs)
    assign_draft_cache_locs = staticmethod(assign_draft_cache_locs)
    get_src_tgt_cache_loc = staticmethod(get_src_tgt_cache_loc)
    alloc_extend = staticmethod(alloc_extend)
    alloc_decode = staticmethod(alloc_decode)
    plan_attention = staticmethod(plan_attention)
    decode_attention = staticmethod(decode_attention)
    extend_attention = staticmethod(extend_attention)
    build_tree_links = staticmethod(build_tree_links)
    verify_tree_greedy = staticmethod(verify_tree_greedy)
    noise_bits = staticmethod(noise_bits)
