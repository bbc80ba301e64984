"""Rows of `req_to_token` as CSR kv_indices, and the per-step form of draft lanes."""

import torch
from torch import Tensor


def create_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    lens: Tensor,
    kv_indptr: Tensor,
    starts: Tensor | None,
    kv_indices: Tensor,
) -> None:
    """Write row b's slots starts[b]..starts[b]+lens[b]-1 at kv_indices[kv_indptr[b]] and on.

    starts None is 0 for every row.
    """
    firsts = [0] * len(lens) if starts is None else starts.tolist()
    rows = zip(
        req_pool_indices.tolist(), lens.tolist(), kv_indptr[:-1].tolist(), firsts, strict=True
    )
    for row, length, out, first in rows:
        kv_indices[out : out + length] = req_to_token[row, first : first + length]


def generate_draft_decode_kv_indices(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    page_size: int,
    topk: int,
    num_steps: int,
) -> tuple[Tensor, Tensor]:
    """The keys of each lane (req, branch) at each draft step s: the prefix, then lane slots 0..s.

    A lane's slots stand in the row from `seq_lens` on, `num_steps` apart; with more than one branch
    on pages of more than one token each branch has whole pages, the first beginning with a copy of
    the prefix's last partial page.

    Returns: kv_indices [num_steps, topk * sum(seq_lens) + bs * topk * num_steps] int32 (row s is
        filled up to its own total, 0 behind) and kv_indptr [num_steps, bs * topk + 1] int32.
    """
    device = req_to_token.device
    bs = len(seq_lens)
    lens = seq_lens.tolist()
    width = topk * sum(lens) + bs * topk * num_steps
    kv_indices = torch.zeros((num_steps, width), dtype=torch.int32, device=device)
    kv_indptr = torch.zeros((num_steps, bs * topk + 1), dtype=torch.int32, device=device)
    for step in range(num_steps):
        out = 0
        for b, (row, length) in enumerate(zip(req_pool_indices.tolist(), lens, strict=True)):
            for branch in range(topk):
                first = lane_start(length, branch, page_size, topk, num_steps)
                kv_indices[step, out : out + length] = req_to_token[row, :length]
                out += length
                lane = req_to_token[row, first : first + step + 1]
                kv_indices[step, out : out + step + 1] = lane
                out += step + 1
                kv_indptr[step, b * topk + branch + 1] = out
    return kv_indices, kv_indptr


def lane_start(seq_len: int, branch: int, page_size: int, topk: int, num_steps: int) -> int:
    """Where in its row a branch's first draft slot stands."""
    if page_size == 1 or topk == 1:
        return seq_len + branch * num_steps
    num_pages = -(-(seq_len % page_size + num_steps) // page_size)
    return seq_len + branch * num_pages * page_size
