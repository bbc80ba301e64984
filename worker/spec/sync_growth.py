"""Growth of trees by a colocated draft, level by level, with every choice on the host.

The best `topk` nodes of a level are computed and their best children compete for the next
(worker/spec/selection.py). Nodes of a req stand in line behind its prefix and see their ancestors
alone. tp_rank 0 chooses; the other ranks are told which nodes to compute, and the trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.parallel.collective import Collective
from paceline.worker.spec.draft_input import EagleDraftInput
from paceline.worker.spec.selection import Candidates, Selection, build_trees, select_top_k_tokens
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import Phase, ReqStep, SpecShape

# (children's probabilities, their ids in the draft's vocabulary), [n, topk] on the host, of logits
# [n, V], given the req (by its number in the batch) and the path in front of each of them.
RankChildren = Callable[[Tensor, Sequence[tuple[int, tuple[int, ...]]]], tuple[Tensor, Tensor]]
# Logits and hidden states of the draft, from rows and a hidden state for each of their tokens.
DraftForward = Callable[[Sequence[ReqStep], Tensor], ForwardOutput]


@dataclass(slots=True)
class _Bush:
    """A tree under growth: `topk` lanes, each on a node of the level selected last."""

    req_pool_index: int
    start: int  # slot and position of a first node
    paths: list[tuple[int, ...]]  # tokens from below the root to each lane's node
    node_parents: list[int] = field(default_factory=list)  # of computed nodes, as in ReqStep

    def climb(self, token_ids: Sequence[int], parent_lanes: Sequence[int]) -> None:
        """The lanes step onto the nodes of the next level."""
        # The nodes of the level before are the last computed ones; the root is none of them.
        first_node = len(self.node_parents) - len(self.paths)
        self.node_parents += [first_node + p if first_node >= 0 else -1 for p in parent_lanes]
        self.paths = [
            (*self.paths[parent], token)
            for parent, token in zip(parent_lanes, token_ids, strict=True)
        ]

    def row(self) -> ReqStep:
        """Computes the lanes' nodes."""
        return ReqStep(
            self.req_pool_index,
            Phase.DRAFT,
            self.start,
            tuple(path[-1] for path in self.paths),
            parents=tuple(self.node_parents),
            num_cached_nodes=len(self.node_parents) - len(self.paths),
        )


def grow_trees(
    start: EagleDraftInput,
    starts: Sequence[int],
    shape: SpecShape,
    forward: DraftForward,
    rank_children: RankChildren,
    hot_token_id: Tensor | None,
    collective: Collective,
) -> list[DraftTree]:
    """A tree behind the root of each row of `start`, the same on every rank; it may be the root
    alone, where the draft has no finite logits.

    Args:
        start: at least `shape.topk` candidates of each row, on the host, in draft vocabulary.
        starts: the slot, which is the position too, of each row's first node.
        shape: `num_steps` 1 or more. The draft computes nodes of all levels but the last.
        hot_token_id: [V] on the host, the target's id of each of the draft's; None: the same ids.
    """
    topk = shape.topk
    bushes = [
        _Bush(row, first, [()] * topk)
        for row, first in zip(start.req_pool_indices_cpu, starts, strict=True)
    ]
    growth = _Growth(topk, hot_token_id) if collective.tp_rank == 0 else None
    if growth is not None:
        assert start.topk_p is not None
        assert start.topk_index is not None
        growth.offer(start.topk_p[:, :topk], start.topk_index[:, :topk])
    assert start.hidden_states is not None
    hidden = start.hidden_states.repeat_interleave(topk, 0)
    first_lanes = torch.arange(len(bushes)).unsqueeze(-1) * topk  # [bs, 1]
    for step in range(1, shape.num_steps):
        lanes = growth.select() if growth is not None else torch.empty(len(bushes), 2 * topk)
        lanes = share(lanes.to(torch.int64), collective, hidden.device)
        for bush, ints in zip(bushes, lanes.tolist(), strict=True):
            bush.climb(ints[:topk], ints[topk:])
        if step > 1:
            parents = (first_lanes + lanes[:, topk:]).flatten()
            hidden = hidden.index_select(0, parents.to(hidden.device))
        out = forward([bush.row() for bush in bushes], hidden)
        assert out.hidden is not None
        hidden = out.hidden
        if growth is not None:
            assert out.logits is not None
            places = [(b, path) for b, bush in enumerate(bushes) for path in bush.paths]
            growth.offer(*rank_children(out.logits, places))
    trees: list[DraftTree] | None = None
    if growth is not None:
        growth.select()
        trees = build_trees(growth.levels, [shape.num_draft_tokens] * len(bushes), topk)
    return _share_trees(trees, len(bushes), shape.num_draft_tokens, collective, hidden.device)


class _Growth:
    """What tp_rank 0 knows of the trees under growth."""

    def __init__(self, topk: int, hot_token_id: Tensor | None) -> None:
        self.levels: list[Candidates] = []
        self._topk = topk
        self._hot_token_id = hot_token_id
        self._topk_p = self._topk_index = torch.empty(0)
        self._selection: Selection | None = None

    def offer(self, topk_p: Tensor, topk_index: Tensor) -> None:
        """Children of the lanes; from here on their ids are the target's."""
        hot = self._hot_token_id
        self._topk_p = topk_p
        self._topk_index = topk_index if hot is None else hot[topk_index]

    def select(self) -> Tensor:
        """Chooses the next level: [bs, 2 * topk], tokens of the lanes, then the lanes they
        continue."""
        scores = None if self._selection is None else self._selection.scores
        self._selection = chosen = select_top_k_tokens(
            len(self.levels), self._topk_p, self._topk_index, scores, self._topk
        )
        self.levels.append(chosen.candidates)
        return torch.cat([chosen.input_ids, chosen.parent_lanes], 1)


def _share_trees(
    trees: list[DraftTree] | None,
    num_trees: int,
    max_nodes: int,
    collective: Collective,
    device: torch.device,
) -> list[DraftTree]:
    if trees is not None and collective.tp_size == 1:
        return trees
    rows = None if trees is None else [(*tree.token_ids, *tree.parents) for tree in trees]
    shared = share_rows(rows, num_trees, 2 * max_nodes, collective, device)
    return [DraftTree(row[: len(row) // 2], row[len(row) // 2 :]) for row in shared]


def share(x: Tensor, collective: Collective, device: torch.device) -> Tensor:
    """tp_rank 0's x, a tensor on the host, on every rank; others pass one of its shape and dtype.

    device: where the group's tensors lie.
    """
    if collective.tp_size == 1:
        return x
    return collective.broadcast(x.contiguous().to(device)).cpu()


def share_rows(
    rows: Sequence[Sequence[int]] | None,
    num_rows: int,
    width: int,
    collective: Collective,
    device: torch.device,
) -> list[tuple[int, ...]]:
    """tp_rank 0's rows, of at most `width` numbers each, on every rank; others pass None."""
    cells = torch.zeros(num_rows, 1 + width, dtype=torch.int64)
    if rows is not None:
        padded = [[len(row), *row, *[0] * (width - len(row))] for row in rows]
        cells = torch.tensor(padded, dtype=torch.int64).view(num_rows, 1 + width)
    shared = share(cells, collective, device).tolist()
    return [tuple(row[1 : 1 + row[0]]) for row in shared]
