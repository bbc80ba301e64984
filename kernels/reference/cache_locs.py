"""Slots between flat lists and rows of `req_to_token`."""

import torch
from torch import Tensor


def assign_req_to_token_pool(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, ends: Tensor, src: Tensor
) -> None:
    """req_to_token[req_pool_indices[b], starts[b]:ends[b]] = the b-th piece of flat src (int64)."""
    done = 0
    rows = zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = src[done : done + end - start]
        done += end - start


def assign_extend_cache_locs(
    req_to_token: Tensor, req_pool_indices: Tensor, starts: Tensor, ends: Tensor, total: int
) -> Tensor:
    """The inverse of `assign_req_to_token_pool`: flat slots [total] int64."""
    out = torch.empty(total, dtype=torch.int64, device=req_to_token.device)
    done = 0
    rows = zip(req_pool_indices.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for row, start, end in rows:
        out[done : done + end - start] = req_to_token[row, start:end]
        done += end - start
    return out


def assign_draft_cache_locs(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    num_new_pages_per_topk: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_steps: int,
    page_size: int,
) -> Tensor:
    """Write draft slots into the rows from seq_lens on; return them without padding.

    With one branch, or pages of one token, req b's slots are `topk * num_steps` in line.
    Otherwise they are `extend_lens[b]`, branch k's from `k * num_new_pages_per_topk[b] * page_size`
    on, and the prefix's partial page (its indices) is repeated in front of each later branch.
    The result depends on `out_cache_loc` alone: it is never read back from the rows.

    Returns: [bs * topk * num_steps] int64 in (req, branch, step) order, in a buffer of its own.
    """
    lanes = topk * num_steps
    paged = page_size > 1 and topk > 1
    out = torch.empty(len(seq_lens) * lanes, dtype=torch.int64, device=out_cache_loc.device)
    out_rows = out.view(-1, topk, num_steps)
    done = 0
    for b, (row, seq_len) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        extend_len = int(extend_lens[b]) if paged else lanes
        stride = int(num_new_pages_per_topk[b]) * page_size if paged else num_steps
        own = out_cache_loc[done : done + extend_len]
        done += extend_len
        req_to_token[row, seq_len : seq_len + extend_len] = own
        for branch in range(topk):
            out_rows[b, branch] = own[branch * stride : branch * stride + num_steps]
        partial = seq_len % page_size if paged else 0
        base = seq_len - partial
        for branch in range(1, topk if partial else 1):
            copy = base + branch * stride
            req_to_token[row, copy : copy + partial] = req_to_token[row, base:seq_len]
    return out


def get_src_tgt_cache_loc(
    out_cache_loc: Tensor,
    accept_index: Tensor,
    accept_length: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where accepted nodes lie, where they belong, and what is left over after them.

    Args:
        out_cache_loc: [bs * num_draft_tokens] int64, the slot of each node.
        accept_index: [bs, d] int64 flat node ids, root first, -1 behind the end.
        accept_length: [bs] int64, accepted nodes without the root.
        seq_lens: [bs] int32, tokens before the root.
    Returns: (src, tgt, freed), flat int64. tgt is the head of each req's own slots; freed its tail
        behind the last page in use, which is kept whole.
    """
    src = out_cache_loc[accept_index[accept_index >= 0]]
    nodes = torch.arange(num_draft_tokens, device=out_cache_loc.device)
    rows = out_cache_loc.view(-1, num_draft_tokens)
    num_kept = accept_length + 1  # [bs]
    tgt = rows[nodes < num_kept[:, None]]
    used = seq_lens + num_kept
    kept_pages = (used + page_size - 1) // page_size * page_size - seq_lens
    freed = rows[nodes >= kept_pages[:, None]]
    return src, tgt, freed
