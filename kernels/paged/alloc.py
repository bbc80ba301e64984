"""Slots from the list of free pages: capacity is checked first, then each req walks its tokens.

The walk is a loop over fixed blocks, so its length is bounded by nothing and compiles once.
"""

# A kernel's arguments are pointers and scalars of Triton's, which has no types to say so.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.checks import check_dtype

BLOCK = 1024


@triton.jit
def _alloc_extend_kernel(
    prefix_lens,
    seq_lens,
    last_loc,
    slot_ends,
    page_ends,
    free_pages,
    slots,
    page_size,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    prefix = tl.load(prefix_lens + b).to(tl.int64)
    seq = tl.load(seq_lens + b).to(tl.int64)
    length = seq - prefix
    old_pages = tl.cdiv(prefix, page_size)
    first_page = tl.load(page_ends + b) - (tl.cdiv(seq, page_size) - old_pages)
    last = tl.load(last_loc + b)
    out = slots + tl.load(slot_ends + b) - length
    for first in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        offs = first + tl.arange(0, BLOCK)
        mask = offs < length
        position = prefix + offs
        new_page = position // page_size - old_pages  # -1 while in the row's last page
        is_new = mask & (new_page >= 0)
        page = tl.load(free_pages + first_page + new_page, mask=is_new, other=0).to(tl.int64)
        slot = tl.where(is_new, page * page_size + position % page_size, last + 1 + offs)
        tl.store(out + offs, slot, mask=mask)


def alloc_extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int
) -> tuple[Tensor, int] | None:
    """As the reference's `alloc_extend`; one sync, for the sizes."""
    check_dtype("last_loc", last_loc, torch.int64)
    bs = len(seq_lens)
    if bs == 0:
        return torch.empty(0, dtype=torch.int64, device=free_pages.device), 0
    prefix, seq = prefix_lens.long(), seq_lens.long()
    slot_ends = (seq - prefix).cumsum(0)
    new_pages = (seq + page_size - 1) // page_size - (prefix + page_size - 1) // page_size
    page_ends = new_pages.cumsum(0)
    num_slots, num_used = torch.stack((slot_ends[-1], page_ends[-1])).tolist()
    if num_used > len(free_pages):
        return None
    slots = torch.empty(num_slots, dtype=torch.int64, device=free_pages.device)
    # A decode step allocates one slot per row; long prefills are few rows.
    programs_per_row = min(triton.cdiv(max(num_slots // bs, 1), BLOCK), 64)
    _alloc_extend_kernel[(bs, programs_per_row)](
        prefix_lens,
        seq_lens,
        last_loc,
        slot_ends,
        page_ends,
        free_pages,
        slots,
        page_size,
        BLOCK=BLOCK,
    )
    return slots, num_used


def alloc_decode(
    seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int
) -> tuple[Tensor, int] | None:
    """As the reference's `alloc_decode`."""
    return alloc_extend(seq_lens - 1, seq_lens, last_loc, free_pages, page_size)
