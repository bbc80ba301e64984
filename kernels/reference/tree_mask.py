"""Tree masks as given: their links and positions, and their bits packed."""

import torch
from torch import Tensor

from paceline.kernels.api import TreeLinks
from paceline.kernels.reference.build_tree import first_true


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int
) -> tuple[TreeLinks, Tensor]:
    """Links and positions of the trees whose masks are given.

    A node's parent is the last node before it that it attends to, its depth their number. Its
    first child is the first later row that attends to it, its next sibling the first later row of
    the same parent.

    Args:
        tree_mask: [bs * num_draft_tokens^2] bool (or uint8), the QLEN_ONLY form.
        seq_lens: [bs], tokens before the roots.
    Returns: (links, positions [bs * num_draft_tokens] int64).
    """
    bs, n = len(seq_lens), num_draft_tokens
    nodes = torch.arange(n, device=tree_mask.device)
    cells = tree_mask.view(bs, n, n) != 0
    before = cells & (nodes < nodes[:, None])
    parent = (before * (nodes + 1)).amax(-1) - 1 if n else before.sum(-1)  # [bs, n]
    later = nodes > nodes[:, None]  # [node, later row]
    next_token = first_true(cells.transpose(1, 2) & later)
    is_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None]
    next_sibling = first_true(is_sibling & later)
    index = torch.arange(bs * n, device=tree_mask.device).view(bs, n)
    positions = (seq_lens[:, None].long() + before.sum(-1)).flatten()
    return TreeLinks(index, next_token, next_sibling), positions


def segment_packbits(x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor) -> None:
    """Pack each segment of x into bytes of y, first bit lowest, the last byte padded with zeros.

    Args:
        x: flat bool.
        input_indptr, output_indptr: [bs + 1] int32, where segments begin in x and in y.
        y: uint8, long enough; nothing else in it is touched.
    """
    weights = (1 << torch.arange(8, device=x.device)).to(torch.uint8)
    starts = zip(input_indptr.tolist(), input_indptr.tolist()[1:], strict=False)
    for (start, end), out in zip(starts, output_indptr.tolist()[:-1], strict=True):
        num_bytes = -(-(end - start) // 8)
        bits = torch.zeros(num_bytes * 8, dtype=torch.uint8, device=x.device)
        bits[: end - start] = x[start:end]
        y[out : out + num_bytes] = (bits.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)
