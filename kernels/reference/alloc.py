"""Slots from the list of free pages. Pure: the caller drops the pages that were used."""

import torch
from torch import Tensor


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int
) -> tuple[Tensor, int] | None:
    """Slots for tokens prefix_lens[b]..seq_lens[b]-1 of each row, flat int64.

    First the rest of the row's last page, behind `last_loc`, then whole new pages from the head of
    `free_pages`, req after req.

    Args:
        prefix_lens, seq_lens: [bs] int.
        last_loc: [bs] int64, the slot of token prefix_lens[b]-1, -1 for none.
        free_pages: page ids.
    Returns: (slots, number of free pages used); None when there are too few, with no other effect.
    """
    old_pages = -(-prefix_lens.long() // page_size)  # [bs]
    new_pages = -(-seq_lens.long() // page_size) - old_pages
    num_used = int(new_pages.sum())
    if num_used > len(free_pages):
        return None
    device = free_pages.device
    extend_lens = (seq_lens - prefix_lens).long()
    row = torch.repeat_interleave(torch.arange(len(seq_lens), device=device), extend_lens)  # [n]
    row_start = extend_lens.cumsum(0) - extend_lens
    offset = torch.arange(len(row), device=device) - row_start[row]
    position = prefix_lens[row] + offset
    new_page = position // page_size - old_pages[row]  # -1 while in the row's last page
    first_page = new_pages.cumsum(0) - new_pages
    is_new = new_page >= 0
    slots = last_loc[row] + 1 + offset
    page = free_pages[(first_page[row] + new_page)[is_new]]
    slots[is_new] = page * page_size + position[is_new] % page_size
    return slots, num_used


def alloc_decode(
    seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int
) -> tuple[Tensor, int] | None:
    """One slot per row for token seq_lens[b]-1, whose page is new when it is the page's first."""
    return alloc_extend(seq_lens - 1, seq_lens, last_loc, free_pages, page_size)
