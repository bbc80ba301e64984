"""Per-req numbers after a verify: the last new token, positions, lengths, what to evict."""

import torch
from torch import Tensor


def fill_new_verified_id(accepted_ids: Tensor, num_new_tokens: Tensor) -> Tensor:
    """The last new token of each req, [bs].

    Args:
        accepted_ids: [bs, d], the target's tokens along each path (predict at accept_index).
        num_new_tokens: [bs], with the bonus.
    """
    return accepted_ids.gather(1, num_new_tokens[:, None].long() - 1)[:, 0]


def create_extend_after_decode_spec_info(
    verified_id: Tensor, seq_lens: Tensor, num_new_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the new tokens of each req stand, and its last one.

    Args:
        verified_id: [sum(num_new_tokens)], req after req.
        seq_lens: [bs], the new tokens included.
        num_new_tokens: [bs], with the bonus; at least 1.
    Returns: (positions [sum(num_new_tokens)] int64, new verified_id [bs]).
    """
    counts = num_new_tokens.long()
    ends = counts.cumsum(0)
    row = torch.searchsorted(ends, torch.arange(len(verified_id), device=ends.device), right=True)
    offset = torch.arange(len(verified_id), device=ends.device) - (ends - counts)[row]
    positions = (seq_lens - counts)[row] + offset
    return positions, verified_id[ends - 1]


def create_accept_length_filter(
    accept_length: Tensor, is_finished: Tensor, seq_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """How many tokens of each req a draft still extends by, and how long it is now.

    Args:
        accept_length: [bs], without the bonus.
        is_finished: [bs] bool.
        seq_lens: [bs], before the verify.
    Returns: (accept_length + 1 or 0 for a finished req, seq_lens + accept_length + 1), both [bs].
    """
    num_new_tokens = accept_length + 1
    new_seq_lens = (seq_lens + num_new_tokens).to(seq_lens.dtype)
    return num_new_tokens.masked_fill(is_finished, 0), new_seq_lens


def align_evict_mask_to_page_size(evict_mask: Tensor, seq_lens: Tensor, page_size: int) -> Tensor:
    """The page of the last token kept is not evicted: a page goes as a whole.

    Args:
        evict_mask: [bs, num_draft_tokens] bool of chains, false for nodes kept, which come first.
        seq_lens: [bs], tokens before the chain.
    Returns: a mask of its own, with that page's nodes cleared.
    """
    num_nodes = evict_mask.shape[1]
    num_kept = num_nodes - evict_mask.sum(-1)
    last = seq_lens + num_kept - 1
    first = last // page_size * page_size - seq_lens  # of that page, as a node; may be negative
    nodes = torch.arange(num_nodes, device=evict_mask.device)
    in_page = (nodes >= first[:, None]) & (nodes < first[:, None] + page_size)
    return evict_mask & ~in_page
