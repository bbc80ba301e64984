"""ReferenceKernels: every op in plain torch, the specification and what serves on a CPU."""

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.act import silu_and_mul
from paceline.kernels.reference.alloc import alloc_decode, alloc_extend
from paceline.kernels.reference.attend import plan_attention
from paceline.kernels.reference.build_tree import build_tree, build_tree_links
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
from paceline.kernels.reference.renorm import top_k_renorm, top_p_renorm
from paceline.kernels.reference.rope import apply_rotary
from paceline.kernels.reference.spec_locs import (
    fill_accepted_out_cache_loc,
    filter_finished_cache_loc,
    get_draft_cache_locs,
)
from paceline.kernels.reference.spec_rows import (
    align_evict_mask_to_page_size,
    create_accept_length_filter,
    create_extend_after_decode_spec_info,
    fill_new_verified_id,
)
from paceline.kernels.reference.store_kv import store_kv
from paceline.kernels.reference.tree_mask import (
    reconstruct_indices_from_tree_mask,
    segment_packbits,
)
from paceline.kernels.reference.tree_sampling import tree_speculative_sampling_target_only
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
    get_draft_cache_locs = staticmethod(get_draft_cache_locs)
    fill_accepted_out_cache_loc = staticmethod(fill_accepted_out_cache_loc)
    filter_finished_cache_loc = staticmethod(filter_finished_cache_loc)
    align_evict_mask_to_page_size = staticmethod(align_evict_mask_to_page_size)
    alloc_extend = staticmethod(alloc_extend)
    alloc_decode = staticmethod(alloc_decode)
    plan_attention = staticmethod(plan_attention)
    decode_attention = staticmethod(decode_attention)
    extend_attention = staticmethod(extend_attention)
    build_tree = staticmethod(build_tree)
    build_tree_links = staticmethod(build_tree_links)
    verify_tree_greedy = staticmethod(verify_tree_greedy)
    tree_speculative_sampling_target_only = staticmethod(tree_speculative_sampling_target_only)
    reconstruct_indices_from_tree_mask = staticmethod(reconstruct_indices_from_tree_mask)
    segment_packbits = staticmethod(segment_packbits)
    fill_new_verified_id = staticmethod(fill_new_verified_id)
    create_extend_after_decode_spec_info = staticmethod(create_extend_after_decode_spec_info)
    create_accept_length_filter = staticmethod(create_accept_length_filter)
    top_k_renorm = staticmethod(top_k_renorm)
    top_p_renorm = staticmethod(top_p_renorm)
    noise_bits = staticmethod(noise_bits)
