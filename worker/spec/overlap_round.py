"""OverlapRound: what an overlapped step queues for its SPECULATE rows, first to last.

It reads what the step before left on the device and leaves the same for the next. Of the host it
knows a few numbers alone (`RoundShape`) and how its reqs are sampled: two rounds equal in these run
the same operations on the same buffers, so that the one may be repeated for the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.worker.dense_sampler import NO_TOKEN
from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.parallel.collective import Collective
from paceline.worker.runner import Runner
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.device_batch import Span, StepRows, evenly, flat
from paceline.worker.spec.device_growth import DeviceGrowth, Grown, agree, max_depth
from paceline.worker.spec.future_rows import FutureRows, Rows
from paceline.worker.spec.pending_overlap import Reported
from paceline.worker.step import SpecShape
from paceline.worker.target.device_rows import DeviceSampler


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What the host says of a round.

    trees: settled (`settle_shape`). max_len: at least the rows' lengths with all that a round
    writes. num_simulated: as `DeviceSampler.verify` takes it.
    """

    trees: SpecShape
    max_len: int
    num_simulated: int = 0


class OverlapRound:
    """One rank's part."""

    def __init__(
        self,
        runner: Runner,
        draft: ColocatedDraft,
        collective: Collective,
        sampler: DeviceSampler | None,
        state: FutureRows,
        topk: int,
    ) -> None:
        """sampler: tp_rank 0's, None elsewhere; topk: candidates that a row is to have."""
        self._runner = runner
        self._draft = draft
        self._collective = collective
        self._sampler = sampler
        self._state = state
        self._topk = topk
        self._growth = DeviceGrowth(draft, runner.kernels, collective, sampler)

    def spans(self, trees: SpecShape) -> list[Span]:
        """Of the forwards of a round: the draft's levels, the target's verify, the draft's extend.

        Unshifted, a draft reads the root again: its slot may not have been there before.
        """
        extended = Span(0, max_depth(trees) + 2 - self._draft.token_shift)
        return [*self._growth.spans(trees), Span(0, trees.num_draft_tokens), extended]

    def run(self, rows: Rows, shape: RoundShape) -> Reported | None:
        """Grows trees, verifies them, brings the KV of what was accepted in line and has the draft
        read it. What became of the rows, on tp_rank 0."""
        start = self._state.look_up(rows, shape.trees.topk)
        assert start.new_seq_lens is not None
        assert start.verified_id is not None
        at = StepRows.look_up(
            rows,
            start.new_seq_lens,
            self.spans(shape.trees),
            self._runner.req_to_token,
            self._runner.kernels,
            num_positions=shape.trees.num_steps + 1,
            max_len=shape.max_len,
            may_overrun=not self._draft.token_shift,
        )
        grown = self._growth.grow(start, shape.trees, at)
        verdict = self._verify(start.new_seq_lens, start.verified_id, grown, shape, at)
        self._extend(verdict, at)
        return verdict.reported

    def _verify(
        self, seq_lens: Tensor, root: Tensor, grown: Grown, shape: RoundShape, at: StepRows
    ) -> "_Verdict":
        runner, trees, rows = self._runner, grown.trees, at.rows
        bs, n = trees.draft_ids.shape
        is_tree, depth = shape.trees.topk > 1, max_depth(shape.trees)
        batch = at.batch(
            len(at.spans) - 2,
            trees.draft_ids,
            trees.positions,
            tree_mask=trees.tree_mask.view(bs, n, n) if is_tree else None,
        )
        out = runner.forward(batch, self._draft.capture)
        roots = evenly(bs, n, torch.int64, seq_lens.device)[:, None]
        width = depth + 1
        mine = logprobs = None
        if self._sampler is not None:
            assert out.logits is not None
            result = self._sampler.verify(
                out.logits, trees, rows.index, rows.index_cpu, seq_lens, depth,
                num_simulated=shape.num_simulated,
            )  # fmt: skip
            logprobs = result.logprobs
            path = torch.maximum(result.accept_index, roots)  # behind its end, the root again
            mine = torch.cat([result.predict[path], path, result.accept_length[:, None]], 1)
        ids, path, accept_length = agree(
            mine, (bs, 2 * width + 1), self._collective, seq_lens.device
        ).split([width, width, 1], 1)
        if is_tree:
            self._move_in_line(at.slots[:, :n], path)
        # A token that could not be chosen leaves its req where it stood.
        num_new_tokens = accept_length + (ids.gather(1, accept_length) != NO_TOKEN)  # [bs, 1]
        with_root = torch.cat([root[:, None], ids], 1)
        reported = None
        if self._sampler is not None:
            self._sampler.commit(rows.index, ids, num_new_tokens[:, 0])
            num_real = grown.num_real
            if num_real is None:
                num_real = torch.zeros_like(root)
            reported = Reported.of([ids, accept_length, num_real[:, None]], logprobs)
        return _Verdict(
            seq_lens + num_new_tokens[:, 0],
            with_root,
            num_new_tokens,
            self.features(out.hidden, bs * n).index_select(0, path.flatten()),
            reported,
        )

    def _move_in_line(self, slots: Tensor, path: Tensor) -> None:
        """The target's KV of accepted nodes, to the slots behind their root's.

        slots [bs, num_draft_tokens], path [bs, max_depth + 1] flat nodes; what goes to the slots
        behind its end is written again by the next step.
        """
        src = flat(slots)[flat(path[:, 1:])]
        tgt = flat(slots[:, 1 : path.shape[1]])
        self._runner.kv.move(self._runner.kernels, src, tgt)

    def _extend(self, verdict: "_Verdict", at: StepRows) -> None:
        """The draft reads the new tokens, with the target's features of the path to them.

        As many tokens of each row as could have been accepted; what lies behind those that were is
        written again by the next step.
        """
        draft, (bs, _) = self._draft, verdict.with_root.shape
        ids = verdict.with_root[:, draft.token_shift :]
        width = ids.shape[1]
        last = (verdict.num_new_tokens[:, 0] - draft.token_shift).clamp(min=0)
        batch = at.batch(
            len(at.spans) - 1,
            ids.clamp(min=0),
            at.positions[:, :width],
            logit_indices=evenly(bs, width, torch.int64, ids.device) + last,
        )
        hidden = verdict.hidden if draft.token_shift else self.features(None, bs * width)
        out = draft.model.forward(batch, hidden, draft.kv)
        verified_id = verdict.with_root.gather(1, verdict.num_new_tokens)[:, 0]
        self.store(at.rows, verdict.seq_lens, verified_id, out)

    def store(
        self,
        rows: Rows,
        seq_lens: Tensor,
        verified_id: Tensor,
        out: ForwardOutput,
        without: Sequence[int] = (),
    ) -> None:
        """What the next step starts from.

        Args:
            seq_lens, verified_id: [bs], behind this step.
            out: what the draft said behind each row's last token.
            without: rows that are to have no guesses.
        """
        assert out.hidden is not None
        candidates = None
        if self._sampler is not None:
            assert out.logits is not None
            positions = seq_lens + 1
            candidates = self._sampler.top_children(
                out.logits,
                rows.index,
                rows.index_cpu,
                positions,
                self._topk,
                self._draft.model.hot_token_id,
            )
            for b in without:
                candidates[0][b] = -torch.inf
        self._state.store(rows, seq_lens, verified_id, out.hidden, candidates)

    def features(self, hidden: Tensor | None, num_tokens: int) -> Tensor:
        """What the draft reads of the target; nothing, for one that reads tokens alone."""
        if hidden is not None:
            return hidden
        return torch.empty(num_tokens, 0, device=self._runner.req_to_token.table.device)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the target said of a batch of trees; `width` is how many tokens it could accept."""

    seq_lens: Tensor  # [bs], behind it
    with_root: Tensor  # [bs, 1 + width], the root, the new tokens, then anything
    num_new_tokens: Tensor  # [bs, 1]
    hidden: Tensor  # [bs * width, features], of the nodes that the new tokens follow
    reported: Reported | None  # on tp_rank 0
