"""sgl-kernel's tree ops behind our signatures: foreign spellings and int32 results end here.

Its ops write into buffers of the caller's, take `retrive_*` for `retrieve_*`, and check nothing.
"""

from typing import Any

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, TreeLinks, TreeMaskMode, VerifyResult
from paceline.kernels.checks import check_thresholds
from paceline.kernels.tree_buffers import check_mask_mode, make_mask, make_positions

_TINY = torch.finfo(torch.float32).tiny  # above 0 also where denormals are flushed


def verify_tree_greedy(
    draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
) -> VerifyResult:
    """Our `verify_tree_greedy`; bs at least 1."""
    result = _empty_result(draft_ids, max_depth)
    _sgl().verify_tree_greedy(
        predicts=result.predict,
        accept_index=result.accept_index,
        accept_token_num=result.accept_length,
        candidates=draft_ids.contiguous(),
        retrive_index=links.retrieve_index,
        retrive_next_token=links.retrieve_next_token,
        retrive_next_sibling=links.retrieve_next_sibling,
        target_predict=target_ids.contiguous(),
    )
    return _as_int64(result)


def tree_speculative_sampling_target_only(
    draft_ids: Tensor,
    links: TreeLinks,
    target_probs: Tensor,
    coins: Tensor,
    final_coins: Tensor,
    max_depth: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> VerifyResult:
    """Our op, for bs of at least 1 and draft_ids inside the vocabulary.

    Theirs accepts at `coin <= sum`, so that a coin of 0 takes a token of probability 0, and at
    `q >= threshold_single`, so that 0 takes any: the next fp32 number above the coin, and the least
    threshold above 0, make both strict.
    """
    single, acc_factor = check_thresholds(threshold_single, threshold_acc)
    result = _empty_result(draft_ids, max_depth)
    above = torch.nextafter(coins, torch.full_like(coins, torch.inf)).clamp(min=_TINY)
    _sgl().tree_speculative_sampling_target_only(
        predicts=result.predict,
        accept_index=result.accept_index,
        accept_token_num=result.accept_length,
        candidates=draft_ids.contiguous(),
        retrive_index=links.retrieve_index,
        retrive_next_token=links.retrieve_next_token,
        retrive_next_sibling=links.retrieve_next_sibling,
        uniform_samples=above,
        uniform_samples_for_final_sampling=final_coins.contiguous(),
        target_probs=target_probs.contiguous(),
        draft_probs=torch.zeros(target_probs.shape, device=target_probs.device),
        threshold_single=max(single, _TINY),
        threshold_acc=acc_factor,
        deterministic=True,
    )
    return _as_int64(result)


def build_tree(
    verified_id: Tensor,
    parents: Tensor,
    selected: Tensor,
    draft_ids: Tensor,
    seq_lens: Tensor,
    topk: int,
    mask_mode: TreeMaskMode,
    *,
    seq_lens_sum: int | None = None,
    tree_mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> BuiltTrees:
    """Our `build_tree`, for bs of at least 1 and trees in which no parent is missing.

    parents is [bs, topk * (num_steps - 1) + 1], or anything where num_steps is 1.
    """
    bs, num_nodes = len(selected), selected.shape[1] + 1
    check_mask_mode(mask_mode, num_nodes)
    is_packed = mask_mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    used = bs * num_nodes * (1 if is_packed else num_nodes)
    if mask_mode is TreeMaskMode.FULL_MASK:
        seq_lens_sum = int(seq_lens.sum()) if seq_lens_sum is None else seq_lens_sum
        used += num_nodes * seq_lens_sum
    positions = make_positions(positions, seq_lens, num_nodes)
    tree_mask = make_mask(tree_mask, mask_mode, bs, num_nodes, seq_lens_sum, seq_lens.device)
    # It sets bits, or clears cells, of what it expects to find filled.
    if is_packed:
        tree_mask[:used].zero_()
    else:
        tree_mask[:used].fill_(True)
    # It takes the width of `parents` from the depth.
    num_steps = max(parents.shape[1] - 1, 0) // topk + 1
    nodes = torch.cat((verified_id[:, None].long(), draft_ids), 1)
    links = TreeLinks(*(torch.full_like(nodes, -1) for _ in range(3)))
    _sgl().build_tree_kernel_efficient(
        parents.contiguous(),
        selected.contiguous(),
        seq_lens.long(),
        tree_mask,
        positions,
        links.retrieve_index,
        links.retrieve_next_token,
        links.retrieve_next_sibling,
        topk,
        num_steps,
        num_nodes,
        int(mask_mode),
    )
    return BuiltTrees(nodes, links, positions, tree_mask)


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int
) -> tuple[TreeLinks, Tensor]:
    """Our op; bs at least 1."""
    bs, device = len(seq_lens), tree_mask.device
    shape = (bs, num_draft_tokens)
    links = TreeLinks(*(torch.full(shape, -1, dtype=torch.int64, device=device) for _ in range(3)))
    positions = torch.empty(bs * num_draft_tokens, dtype=torch.int64, device=device)
    _sgl().reconstruct_indices_from_tree_mask(
        tree_mask.bool(),
        seq_lens.long(),
        positions,
        links.retrieve_index,
        links.retrieve_next_token,
        links.retrieve_next_sibling,
        bs,
        num_draft_tokens,
    )
    return links, positions


def segment_packbits(x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor) -> None:
    """Our op; at least one segment."""
    _sgl().segment_packbits(x, input_indptr, output_indptr, y, len(input_indptr) - 1)


def _sgl() -> Any:
    import sgl_kernel

    return sgl_kernel


def _empty_result(draft_ids: Tensor, max_depth: int) -> VerifyResult:
    bs, num_nodes = draft_ids.shape
    device = draft_ids.device
    return VerifyResult(
        torch.zeros(bs * num_nodes, dtype=torch.int32, device=device),
        torch.full((bs, max_depth + 1), -1, dtype=torch.int32, device=device),
        torch.zeros(bs, dtype=torch.int32, device=device),
    )


def _as_int64(result: VerifyResult) -> VerifyResult:
    return VerifyResult(
        result.predict.long(), result.accept_index.long(), result.accept_length.long()
    )
