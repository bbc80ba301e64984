"""Growth of draft trees for a whole batch on the device, level by level, without a sync.

tp_rank 0 alone has logits: it chooses what each level expands and which candidates make the trees,
and the other ranks are told in small tensors. Nodes stand in line in their req's row, `topk` for
each level; a tree mask, not a lane of pages, says what a node's ancestors are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.api import BuiltTrees, KernelSet, TreeMaskMode
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.parallel.collective import Collective
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.device_batch import RowSpan, device_batch
from paceline.worker.spec.draft_input import EagleDraftInput
from paceline.worker.spec.future_rows import Rows
from paceline.worker.spec.limits import max_tree_nodes
from paceline.worker.spec.selection import Candidates, organise_tensors, select_top_k_tokens
from paceline.worker.step import SpecShape
from paceline.worker.target.device_rows import DeviceSampler


@dataclass(frozen=True, slots=True)
class Grown:
    """Trees that the target can verify; `num_real` [bs] counts drafts, on tp_rank 0."""

    trees: BuiltTrees
    max_depth: int
    num_real: Tensor | None


class DeviceGrowth:
    """Grows with one rank's part of a draft; `sampler` is tp_rank 0's, None elsewhere."""

    def __init__(
        self,
        draft: ColocatedDraft,
        req_to_token: ReqToToken,
        kernels: KernelSet,
        collective: Collective,
        sampler: DeviceSampler | None,
    ) -> None:
        self._draft = draft
        self._req_to_token = req_to_token
        self._kernels = kernels
        self._collective = collective
        self._sampler = sampler

    def grow(
        self, rows: Rows, start: EagleDraftInput, shape: SpecShape, max_lens: Sequence[int]
    ) -> Grown:
        """A tree behind the root of each row.

        Args:
            start: the rows' state, with `shape.topk` candidates.
            max_lens: at least their seq_lens, on the host.
        """
        bs, num_steps, topk = start.bs, shape.num_steps, shape.topk
        num_nodes = min(shape.num_draft_tokens, max_tree_nodes(num_steps, topk))
        if num_steps == 0 or num_nodes <= 1:
            none = rows.index.new_empty(bs, 0)
            return self._build(start, (none, none, none), 1, 0, None)
        steps = self._climb(rows, start, shape, max_lens)
        num_groups = 1 + topk * (num_steps - 1)
        widths = [num_groups, num_nodes - 1, num_nodes - 1]
        mine = num_real = None
        if self._sampler is not None:
            organised = organise_tensors(steps, num_nodes)
            mine = torch.cat([organised.parents, organised.selected, organised.draft_ids], 1)
            num_real = organised.num_real
        parts = self._agree(mine, bs, sum(widths)).split(widths, 1)
        max_depth = min(num_steps, num_nodes - 1)
        return self._build(start, (parts[0], parts[1], parts[2]), topk, max_depth, num_real)

    def _climb(
        self, rows: Rows, start: EagleDraftInput, shape: SpecShape, max_lens: Sequence[int]
    ) -> list[Candidates]:
        """The candidates of every level on tp_rank 0; all levels but the last are computed."""
        draft, topk = self._draft, shape.topk
        assert start.new_seq_lens is not None
        assert start.hidden_states is not None
        steps: list[Candidates] = []
        probs, index, scores = start.topk_p, start.topk_index, None
        seq_lens, first = start.new_seq_lens, start.new_seq_lens + 1 - draft.token_shift
        lanes = rows.repeat(topk)
        hidden = start.hidden_states.repeat_interleave(topk, 0)  # [bs * topk, hidden_size]
        sees = torch.empty(start.bs, topk, 0, dtype=torch.bool, device=first.device)
        own = torch.eye(topk, dtype=torch.bool, device=first.device).expand(start.bs, topk, topk)
        span = RowSpan(rows, first, topk * (shape.num_steps - 1), [n + 1 for n in max_lens])
        slots = span.slots(self._req_to_token, self._kernels)
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
            input_ids, parents = self._agree(chosen, start.bs, 2 * topk).split(topk, 1)
            if level > 0:
                lane_of = torch.arange(start.bs, device=first.device)[:, None] * topk + parents
                hidden = hidden.index_select(0, lane_of.flatten())
            if topk > 1:
                seen = sees.gather(1, parents[:, :, None].expand(-1, -1, sees.shape[2]))
                sees = torch.cat([seen, own], 2)
            batch = device_batch(
                replace(span, num_new=topk * (level + 1)),
                input_ids,
                (first + level)[:, None].expand(-1, topk),
                slots[:, topk * level : topk * (level + 1)],
                self._req_to_token,
                self._kernels,
                tree_mask=sees if topk > 1 else None,
            )
            out = draft.model.forward(batch, hidden, draft.kv)
            assert out.hidden is not None
            hidden = out.hidden
            if self._sampler is not None:
                assert out.logits is not None
                probs, index = self._sampler.top_children(
                    out.logits,
                    lanes.index,
                    lanes.index_cpu,
                    (seq_lens + level + 2).repeat_interleave(topk),
                    topk,
                    draft.model.hot_token_id,
                )
        return steps

    def _build(
        self,
        start: EagleDraftInput,
        organised: tuple[Tensor, Tensor, Tensor],
        topk: int,
        max_depth: int,
        num_real: Tensor | None,
    ) -> Grown:
        assert start.verified_id is not None
        assert start.new_seq_lens is not None
        trees = self._kernels.build_tree(
            start.verified_id, *organised, start.new_seq_lens, topk, TreeMaskMode.QLEN_ONLY
        )
        return Grown(trees, max_depth, num_real)

    def _agree(self, mine: Tensor | None, bs: int, width: int) -> Tensor:
        """tp_rank 0's [bs, width] int64 on every rank."""
        device = self._req_to_token.table.device
        if mine is None:
            mine = torch.empty(bs, width, dtype=torch.int64, device=device)
        assert mine.shape == (bs, width), (mine.shape, bs, width)
        return self._collective.broadcast(mine)

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        hot = self._draft.model.hot_token_id
        return draft_ids if hot is None else hot[draft_ids]
