"""Growth of draft trees for a whole batch on the device, level by level, without a sync.

tp_rank 0 alone has logits: it chooses what each level expands and which candidates make the trees,
and the other ranks are told in small tensors. Nodes stand in line in their req's row, `topk` for
each level; a tree mask, not a lane of pages, says what a node's ancestors are. One branch is a
chain: its tree is known beforehand, and nothing is compared, sorted or looked up in it.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet, TreeLinks, TreeMaskMode
from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.parallel.collective import Collective
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.device_batch import Span, StepRows, evenly, flat
from paceline.worker.spec.draft_input import EagleDraftInput
from paceline.worker.spec.limits import max_tree_nodes
from paceline.worker.spec.selection import Candidates, organise_tensors, select_top_k_tokens
from paceline.worker.step import SpecShape
from paceline.worker.target.device_rows import DeviceSampler


def settle_shape(shape: SpecShape) -> SpecShape:
    """The same without levels and nodes that come to nothing."""
    num_nodes = min(shape.num_draft_tokens, max_tree_nodes(shape.num_steps, shape.topk))
    if shape.num_steps == 0 or num_nodes <= 1:
        return SpecShape(num_steps=0, topk=1, num_draft_tokens=1)
    num_steps = num_nodes - 1 if shape.topk == 1 else shape.num_steps
    return SpecShape(num_steps, shape.topk, num_nodes)


def max_depth(shape: SpecShape) -> int:
    """Most drafts down one branch of a settled shape."""
    return min(shape.num_steps, shape.num_draft_tokens - 1)


@dataclass(frozen=True, slots=True)
class Grown:
    """Trees that the target can verify; `num_real` [bs] counts drafts, on tp_rank 0."""

    trees: BuiltTrees
    num_real: Tensor | None


class DeviceGrowth:
    """Grows with one rank's part of a draft; `sampler` is tp_rank 0's, None elsewhere."""

    def __init__(
        self,
        draft: ColocatedDraft,
        kernels: KernelSet,
        collective: Collective,
        sampler: DeviceSampler | None,
    ) -> None:
        self._draft = draft
        self._kernels = kernels
        self._collective = collective
        self._sampler = sampler

    def spans(self, shape: SpecShape) -> list[Span]:
        """Of the forwards that `grow` does first in a step: all levels but the last."""
        first, topk = 1 - self._draft.token_shift, shape.topk
        return [
            Span(first + topk * level, first + topk * (level + 1))
            for level in range(shape.num_steps - 1)
        ]

    def grow(self, start: EagleDraftInput, shape: SpecShape, at: StepRows) -> Grown:
        """A tree behind the root of each row.

        Args:
            start: the rows' state, with `shape.topk` candidates.
            shape: settled.
        """
        assert start.verified_id is not None
        root = start.verified_id[:, None]
        if shape.num_steps == 0:
            return Grown(_chains(root, at.positions, None), None)
        if shape.topk == 1:
            return self._grow_chains(root, start, shape, at)
        return self._grow_trees(root, start, shape, at)

    def _grow_chains(
        self, root: Tensor, start: EagleDraftInput, shape: SpecShape, at: StepRows
    ) -> Grown:
        score, index, hidden = start.topk_p, start.topk_index, start.hidden_states
        assert hidden is not None
        drafts, scores = [root], []
        for level in range(shape.num_steps):
            chosen = None
            if self._sampler is not None:
                assert score is not None
                assert index is not None
                scores.append(score)
                chosen = self._target_ids(index)
            drafts.append(agree(chosen, (at.rows.bs, 1), self._collective, root.device))
            if level == shape.num_steps - 1:
                break
            out = self._forward(level, at, drafts[-1], hidden)
            assert out.hidden is not None
            hidden = out.hidden
            if self._sampler is not None:
                score, index = self._children(level, at, out, 1)
        draft_ids = torch.cat(drafts, 1)
        if not scores:
            return Grown(_chains(draft_ids, at.positions, None), None)
        # Behind a draft that there is not, there is none; nor is there one behind the last.
        scores.append(_no_score(at.rows.bs, root.device))
        has_next = torch.cat(scores, 1).cummin(1).values > -torch.inf  # [bs, num_steps + 1]
        return Grown(_chains(draft_ids, at.positions, has_next), has_next.sum(1))

    def _grow_trees(
        self, root: Tensor, start: EagleDraftInput, shape: SpecShape, at: StepRows
    ) -> Grown:
        assert start.new_seq_lens is not None
        bs, num_nodes = at.rows.bs, shape.num_draft_tokens
        steps = self._climb(start, shape, at)
        num_groups = 1 + shape.topk * (shape.num_steps - 1)
        widths = [num_groups, num_nodes - 1, num_nodes - 1]
        mine = num_real = None
        if self._sampler is not None:
            organised = organise_tensors(steps, num_nodes)
            mine = torch.cat([organised.parents, organised.selected, organised.draft_ids], 1)
            num_real = organised.num_real
        parts = agree(mine, (bs, sum(widths)), self._collective, root.device).split(widths, 1)
        trees = self._kernels.build_tree(
            root[:, 0], parts[0], parts[1], parts[2], start.new_seq_lens, shape.topk,
            TreeMaskMode.QLEN_ONLY,
        )  # fmt: skip
        return Grown(trees, num_real)

    def _climb(self, start: EagleDraftInput, shape: SpecShape, at: StepRows) -> list[Candidates]:
        """The candidates of every level on tp_rank 0; all levels but the last are computed."""
        bs, topk, device = at.rows.bs, shape.topk, at.slots.device
        assert start.hidden_states is not None
        steps: list[Candidates] = []
        probs, index, scores = start.topk_p, start.topk_index, None
        hidden = start.hidden_states.repeat_interleave(topk, 0)  # [bs * topk, hidden_size]
        first_lanes = evenly(bs, topk, torch.int64, device)[:, None]
        own = _own_cells(bs, topk, device)
        sees = own[:, :, :0]  # [bs, topk, nodes]
        for level in range(shape.num_steps):
            chosen = None
            if self._sampler is not None:
                assert probs is not None
                assert index is not None
                selection = select_top_k_tokens(level, probs, self._target_ids(index), scores, topk)
                scores = selection.scores
                steps.append(selection.candidates)
                chosen = torch.cat([selection.input_ids, selection.parent_lanes], 1)
            if level == shape.num_steps - 1:
                break
            shared = agree(chosen, (bs, 2 * topk), self._collective, device)
            input_ids, parents = shared.split(topk, 1)
            if level > 0:
                hidden = hidden.index_select(0, (first_lanes + parents).flatten())
                sees = sees.gather(1, parents[:, :, None].expand(-1, -1, sees.shape[2]))
            sees = torch.cat([sees, own], 2)
            out = self._forward(level, at, input_ids, hidden, sees)
            assert out.hidden is not None
            hidden = out.hidden
            if self._sampler is not None:
                probs, index = self._children(level, at, out, topk)
        return steps

    def _forward(
        self,
        level: int,
        at: StepRows,
        input_ids: Tensor,
        hidden: Tensor,
        sees: Tensor | None = None,
    ) -> ForwardOutput:
        """Of all lanes, input_ids [bs, topk], which stand at one depth."""
        place = level + 1 - self._draft.token_shift
        positions = at.positions[:, place : place + 1].expand(-1, input_ids.shape[1])
        batch = at.batch(level, input_ids, positions, tree_mask=sees)
        return self._draft.model.forward(batch, hidden, self._draft.kv)

    def _children(
        self, level: int, at: StepRows, out: ForwardOutput, topk: int
    ) -> tuple[Tensor, Tensor]:
        assert self._sampler is not None
        assert out.logits is not None
        return self._sampler.top_children(
            out.logits,
            at.rows.index,
            at.rows.index_cpu,
            at.positions[:, level + 2 : level + 3].expand(-1, topk),
            topk,
            self._draft.model.hot_token_id,
        )

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        hot = self._draft.model.hot_token_id
        return draft_ids if hot is None else hot[draft_ids]


def agree(
    mine: Tensor | None, shape: tuple[int, ...], collective: Collective, device: torch.device
) -> Tensor:
    """tp_rank 0's int64 on every rank; the others pass None."""
    if mine is None:
        mine = torch.empty(shape, dtype=torch.int64, device=device)
    assert mine.shape == shape, (mine.shape, shape)
    return mine if collective.tp_size == 1 else collective.broadcast(mine.contiguous())


def _chains(draft_ids: Tensor, positions: Tensor, has_next: Tensor | None) -> BuiltTrees:
    """Trees of one branch, as `KernelSet.build_tree` makes them.

    draft_ids: [bs, n], the root first; positions [bs, n or more]; has_next: [bs, n] bool, whether
    the node behind each is a draft, or else linked nowhere; None: all but the last's.
    """
    bs, n = draft_ids.shape
    links = _chain_links(bs, n, draft_ids.device)
    if has_next is not None:
        children = torch.where(has_next, links.retrieve_next_token, -1)
        links = replace(links, retrieve_next_token=children)
    mask = _chain_mask(bs, n, draft_ids.device)
    return BuiltTrees(draft_ids, links, flat(positions[:, :n]), mask)


# Made once, as in device_batch.py.


@cache
def _chain_links(bs: int, num_nodes: int, device: torch.device) -> TreeLinks:
    index = torch.arange(bs * num_nodes, device=device).view(bs, num_nodes)
    children = torch.arange(1, num_nodes + 1, device=device).repeat(bs, 1)
    children[:, -1] = -1
    return TreeLinks(index, children, torch.full_like(index, -1))


@cache
def _chain_mask(bs: int, num_nodes: int, device: torch.device) -> Tensor:
    cells = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=device).tril()
    return cells.repeat(bs, 1, 1).flatten()


@cache
def _own_cells(bs: int, topk: int, device: torch.device) -> Tensor:
    """What each lane sees of its own level: itself."""
    return torch.eye(topk, dtype=torch.bool, device=device).repeat(bs, 1, 1)


@cache
def _no_score(bs: int, device: torch.device) -> Tensor:
    return torch.full((bs, 1), -torch.inf, device=device)
