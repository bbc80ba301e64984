"""Parents of draft nodes → the links that a verify walks."""

import torch
from torch import Tensor

from paceline.kernels.api import TreeLinks


def build_tree_links(parents: Tensor) -> TreeLinks:
    """parents [bs, num_draft_tokens] int64 -> links; children of one parent in ascending order.

    The root is column 0 with parent -1; -2 marks padding nodes, which are linked nowhere.
    """
    bs, num_nodes = parents.shape
    nodes = torch.arange(num_nodes, device=parents.device)
    is_child = parents[:, None, :] == nodes[:, None]  # [bs, parent, child]
    next_token = _first(is_child)
    is_sibling = (parents[:, None, :] == parents[:, :, None]) & (parents >= 0)[:, :, None]
    next_sibling = _first(is_sibling & (nodes > nodes[:, None]))
    index = torch.arange(bs * num_nodes, device=parents.device).view(bs, num_nodes)
    return TreeLinks(index, next_token, next_sibling)


def _first(mask: Tensor) -> Tensor:
    """The index of the first true cell of each row, -1 for none."""
    return mask.byte().argmax(-1).masked_fill_(~mask.any(-1), -1)
