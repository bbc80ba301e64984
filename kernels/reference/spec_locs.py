"""Slots of draft lanes and of accepted nodes, gathered from where they lie."""

import torch
from torch import Tensor

from paceline.kernels.reference.kv_indices import lane_start


def get_draft_cache_locs(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> Tensor:
    """The draft slots of rows that were given enough of them before.

    Lanes stand in a row from seq_lens on, `num_steps` apart, or on whole pages of their own where
    topk > 1 and page_size > 1.

    Returns: [bs * topk * num_steps] int64 in (req, lane, step) order.
    """
    lanes = [
        req_to_token[row, first : first + num_steps]
        for row, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        for first in (lane_start(length, k, page_size, topk, num_steps) for k in range(topk))
    ]
    return torch.cat([req_to_token.new_empty(0), *lanes]).long()


def fill_accepted_out_cache_loc(accept_index: Tensor, out_cache_loc: Tensor) -> Tensor:
    """The slots of all accepted nodes of a batch, without gaps.

    Args:
        accept_index: [bs, d] int64 flat node ids, -1 for none.
        out_cache_loc: [bs * num_draft_tokens] int64.
    Returns: [bs * d] int64, filled up with slot 0, so that no one need know how many there are.
    """
    nodes = accept_index.flatten()
    is_accepted = nodes >= 0
    out = torch.zeros(len(nodes) + 1, dtype=out_cache_loc.dtype, device=out_cache_loc.device)
    at = (is_accepted.cumsum(0) - 1).masked_fill_(~is_accepted, len(nodes))
    slots = out_cache_loc[nodes.clamp(min=0)]
    out[at] = slots.masked_fill_(~is_accepted, 0)
    return out[:-1]


def filter_finished_cache_loc(
    tgt_cache_loc: Tensor, accept_length: Tensor, accept_length_filter: Tensor, total: int
) -> Tensor:
    """The slots of the reqs that go on.

    Args:
        tgt_cache_loc: [sum(accept_length + 1)] int64, req after req.
        accept_length, accept_length_filter: [bs]; of req b the first accept_length_filter[b].
        total: sum(accept_length_filter).
    Returns: [total] int64.
    """
    counts = accept_length.long() + 1
    starts = (counts.cumsum(0) - counts).tolist()
    kept = zip(starts, accept_length_filter.tolist(), strict=True)
    pieces = [tgt_cache_loc[start : start + count] for start, count in kept]
    out = torch.cat([tgt_cache_loc[:0], *pieces])
    assert len(out) == total
    return out
