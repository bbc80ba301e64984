"""SyncPath: a step with a colocated draft, done when it is launched, every choice on the host.

One step: the draft grows a tree behind each SPECULATE row's root, the target computes all rows in
one forward and hands over its hidden states, tp_rank 0 decides, accepted KV is brought in line,
and the draft computes the tokens that are new, so that its next trees can start from them.

Between steps the KV of a draft is right for all tokens that the target has computed. A row whose
draft has no candidates to start from, for whatever reason, is decoded plainly and has some then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.worker.batch import build_batch
from paceline.worker.config import WorkerConfig
from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.parallel.collective import Collective
from paceline.worker.runner import Runner
from paceline.worker.sampler import LogitRow, Sampler
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.commit import commit_tokens
from paceline.worker.spec.draft_input import EagleDraftInput
from paceline.worker.spec.speculation_path import FinishedStep, SpeculationPath
from paceline.worker.spec.sync_growth import grow_trees, share_rows
from paceline.worker.spec.tree import DraftTree
from paceline.worker.step import (
    PendingStep,
    Phase,
    ReqStep,
    RowResult,
    SamplingRow,
    StepPlan,
    StepReply,
)
from paceline.worker.target.verify import decide

SamplingRows = Sequence[SamplingRow | None]


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What every rank must know of what came of a row."""

    new_ids: tuple[int, ...]
    path: tuple[int, ...]  # accepted nodes of a tree, its root first
    goes_on: bool  # the draft reads what the row computed

    def encode(self) -> tuple[int, ...]:
        return (int(self.goes_on), len(self.new_ids), *self.new_ids, *self.path)

    @classmethod
    def decode(cls, ints: tuple[int, ...]) -> "_Verdict":
        stop = 2 + ints[1]
        return cls(ints[2:stop], ints[stop:], bool(ints[0]))


@dataclass(frozen=True, slots=True)
class _Extend:
    """A row's share of a draft extend."""

    row: ReqStep
    features: tuple[int, ...]  # the target's tokens whose hidden states it reads
    # Its number in the plan, and what is new in it, if its req can be drafted for from here.
    seed: tuple[int, tuple[int, ...]] | None


class SyncPath(SpeculationPath):
    is_overlapped = False

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        draft: ColocatedDraft,
        collective: Collective,
        sampler: Sampler,
    ) -> None:
        self._config = config
        self._runner = runner
        self._draft = draft
        self._collective = collective
        self._sampler = sampler
        self._has_prefix_cache = config.cache.enable_prefix_caching
        self._device = runner.req_to_token.table.device
        hot = draft.model.hot_token_id
        self._hot_token_id = None if hot is None else hot.cpu()
        # What trees can start from: numbers on the host, on tp_rank 0 with as many candidates as
        # a tree may want, and hidden states where the draft computes.
        self._num_candidates = config.spec.topk
        self._state: EagleDraftInput | None = None

    def launch(self, plan: StepPlan, sampling: SamplingRows) -> PendingStep:
        return FinishedStep(StepReply(plan.step_id, self._step(plan, sampling)))

    def follow(self, plan: StepPlan) -> None:
        self._step(plan, [None] * len(plan.rows))

    @torch.inference_mode()
    def _step(self, plan: StepPlan, sampling: SamplingRows) -> tuple[RowResult, ...]:
        """The whole step; its results are tp_rank 0's alone."""
        self._runner.req_to_token.write_pages(plan.rows)
        plan = self._with_trees(plan, self._grow(plan, sampling))
        out = self._runner.forward(self._runner.build(plan), self._draft.capture)
        results: tuple[RowResult, ...] = ()
        verdicts = None
        if self._collective.tp_rank == 0:
            results, verdicts = self._decide(plan, out.logits, sampling)
        verdicts = self._share(plan, verdicts)
        self._move_kv(plan, verdicts)
        self._extend_draft(plan, verdicts, out.hidden, sampling)
        return results

    # ---- drafting

    def _grow(self, plan: StepPlan, sampling: SamplingRows) -> dict[int, DraftTree]:
        """The tree of each row of the plan that has candidates to start from."""
        shape, state = plan.shape, self._state
        if state is None or shape is None or shape.num_steps == 0 or shape.num_draft_tokens < 2:
            return {}
        assert state.new_seq_lens is not None
        assert state.verified_id is not None
        standing = dict(
            zip(
                state.req_pool_indices_cpu,
                zip(state.new_seq_lens.tolist(), state.verified_id.tolist(), strict=True),
                strict=True,
            )
        )
        ready = [
            i
            for i, row in enumerate(plan.rows)
            if row.phase is Phase.SPECULATE
            and standing.get(row.req_pool_index) == (row.prefix_len, row.input_ids[0])
        ]
        if not ready:
            return {}
        shape = replace(shape, topk=min(shape.topk, self._num_candidates))
        first_slot = 1 - self._draft.token_shift  # behind the prefix
        trees = grow_trees(
            state.filter_batch([plan.rows[i].req_pool_index for i in ready]),
            [plan.rows[i].prefix_len + first_slot for i in ready],
            shape,
            self._forward_draft,
            lambda logits, places: self._rank_children(
                logits, [_logit_row(sampling[ready[b]], path) for b, path in places], shape.topk
            ),
            self._hot_token_id,
            self._collective,
        )
        return dict(zip(ready, trees, strict=True))

    def _with_trees(self, plan: StepPlan, trees: dict[int, DraftTree]) -> StepPlan:
        """The plan as the target computes it: trees to verify, and single tokens."""
        rows = []
        for i, row in enumerate(plan.rows):
            row = replace(row, pages=())
            if row.phase is Phase.SPECULATE:
                tree = trees.get(i)
                if tree is None or not tree.token_ids:
                    row = replace(row, phase=Phase.DECODE)
                else:
                    row = replace(
                        row,
                        phase=Phase.VERIFY,
                        input_ids=(*row.input_ids, *tree.token_ids),
                        parents=(-1, *tree.parents),
                    )
            rows.append(row)
        return StepPlan(plan.step_id, tuple(rows), plan.shape)

    def _forward_draft(self, rows: Sequence[ReqStep], hidden: Tensor) -> ForwardOutput:
        runner = self._runner
        batch = build_batch(StepPlan(0, tuple(rows)), runner.req_to_token, runner.kernels)
        return self._draft.model.forward(batch, hidden, self._draft.kv)

    def _rank_children(
        self, logits: Tensor, rows: Sequence[LogitRow], topk: int
    ) -> tuple[Tensor, Tensor]:
        """(probabilities, ids in draft vocabulary) of each row's likeliest: [n, topk], host."""
        probs, ids = self._sampler.top_children(logits, rows, topk, self._draft.model.hot_token_id)
        return probs.cpu(), ids.cpu()

    # ---- verification

    def _decide(
        self, plan: StepPlan, logits: Tensor | None, sampling: SamplingRows
    ) -> tuple[tuple[RowResult, ...], list[_Verdict]]:
        decision = decide(plan, logits, sampling, self._sampler, self._runner.kernels)
        verdicts = []
        for row, result, path, row_sampling in zip(
            plan.rows, decision.rows, decision.paths, sampling, strict=True
        ):
            goes_on = row.num_logits == 0 or bool(result.new_ids)
            # The pages of a prompt may outlive the req; those of a last run are a few tokens.
            if goes_on and not (row.phase is Phase.PREFILL and self._has_prefix_cache):
                goes_on = not self._ends(result.new_ids, row_sampling)
            verdicts.append(_Verdict(result.new_ids, path, goes_on))
        return decision.rows, verdicts

    def _ends(self, new_ids: tuple[int, ...], sampling: SamplingRow | None) -> bool:
        """Whether the req surely ends with this run: its draft has nothing more to do."""
        if sampling is None:  # a chunk before the last
            return False
        num_output = len(sampling.output_ids)
        done = commit_tokens(
            new_ids,
            num_output_before=num_output,
            num_total_before=len(sampling.prompt_ids) + num_output,
            params=sampling.params,
            eos_token_ids=self._config.model.eos_token_ids,
            max_model_len=self._config.model.max_model_len,
        )
        return done.finish_reason is not None

    def _share(self, plan: StepPlan, verdicts: list[_Verdict] | None) -> list[_Verdict]:
        if verdicts is not None and self._collective.tp_size == 1:
            return verdicts
        max_nodes = max(
            (len(row.input_ids) for row in plan.rows if row.phase is Phase.VERIFY), default=1
        )
        rows = None if verdicts is None else [verdict.encode() for verdict in verdicts]
        shared = share_rows(rows, len(plan.rows), 2 + 2 * max_nodes, self._collective, self._device)
        return [_Verdict.decode(row) for row in shared]

    def _move_kv(self, plan: StepPlan, verdicts: Sequence[_Verdict]) -> None:
        moves = self._runner.req_to_token.line_up(plan.rows, [v.path for v in verdicts])
        if moves.src:
            self._runner.move_kv(moves)

    # ---- draft extend

    def _extend_draft(
        self,
        plan: StepPlan,
        verdicts: Sequence[_Verdict],
        features: Tensor | None,
        sampling: SamplingRows,
    ) -> None:
        """Computes the draft's KV of the target's new tokens, and what the next trees start from.

        features: [num_tokens, width], the target's hidden states; None for a draft that reads none.
        """
        extends = []
        first = 0
        for i, (row, verdict) in enumerate(zip(plan.rows, verdicts, strict=True)):
            extend = self._extend_of(i, row, verdict, first) if verdict.goes_on else None
            if extend is not None:
                extends.append(extend)
            first += len(row.input_ids)
        new = None
        if extends:
            out = self._forward_draft(
                [extend.row for extend in extends],
                self._take_features(features, extends),
            )
            new = self._seed([x for x in extends if x.seed is not None], out, sampling)
        self._settle(plan, new)

    def _extend_of(self, index: int, row: ReqStep, verdict: _Verdict, first: int) -> _Extend | None:
        """first: the row's first token in the forward. None: there is nothing to compute."""
        nodes: Sequence[int] = range(len(row.input_ids))
        new_ids = verdict.new_ids
        if row.phase is Phase.VERIFY:
            nodes = verdict.path
            known = (row.input_ids[0], *new_ids)
        else:
            known = (*row.input_ids, *(new_ids or ((row.next_id,) if row.next_id >= 0 else ())))
        # known[i] stands at position prefix_len + i; the target has computed all but the last.
        shift = self._draft.token_shift
        ids = known[shift:]
        is_seed = bool(new_ids)
        slots_left = self._runner.req_to_token.owned_len(row.req_pool_index) - row.prefix_len
        if len(ids) > slots_left:  # an unshifted draft, whose last token has no slot yet
            ids, is_seed = ids[:slots_left], False
        if not ids:
            return None
        extend = ReqStep(
            row.req_pool_index, Phase.PREFILL, row.prefix_len, ids, num_logits=int(is_seed)
        )
        features = tuple(first + node for node in nodes[: len(ids)])
        return _Extend(extend, features, (index, new_ids) if is_seed else None)

    def _take_features(self, features: Tensor | None, extends: Sequence[_Extend]) -> Tensor:
        """[num_tokens of the extends, width]; of width 0 for a draft that reads none."""
        if features is None:
            num_tokens = sum(len(extend.row.input_ids) for extend in extends)
            return torch.empty(num_tokens, 0, device=self._device)
        tokens = [token for extend in extends for token in extend.features]
        return features.index_select(0, torch.tensor(tokens).to(self._device))

    def _seed(
        self, extends: Sequence[_Extend], out: ForwardOutput, sampling: SamplingRows
    ) -> EagleDraftInput | None:
        """What the next trees of these rows start from; `out` holds one row for each."""
        if not extends:
            return None
        seeds = [extend.seed for extend in extends if extend.seed is not None]
        topk_p = topk_index = None
        if out.logits is not None:
            rows = [_logit_row(sampling[i], new_ids) for i, new_ids in seeds]
            topk_p, topk_index = self._rank_children(out.logits, rows, self._num_candidates)
        req_rows = tuple(extend.row.req_pool_index for extend in extends)
        # An unshifted draft has computed the root as well.
        num_ahead = 1 - self._draft.token_shift
        seq_lens = [x.row.prefix_len + len(x.row.input_ids) - num_ahead for x in extends]
        return EagleDraftInput(
            req_pool_indices=torch.tensor(req_rows),
            req_pool_indices_cpu=req_rows,
            verified_id=torch.tensor([new_ids[-1] for _, new_ids in seeds]),
            topk_p=topk_p,
            topk_index=topk_index,
            hidden_states=out.hidden,
            new_seq_lens=torch.tensor(seq_lens),
        )

    def _settle(self, plan: StepPlan, new: EagleDraftInput | None) -> None:
        """Rows that were not in the step stay as they are; of those that were, the new ones."""
        if self._state is not None:
            stepped = {row.req_pool_index for row in plan.rows}
            resting = [row for row in self._state.req_pool_indices_cpu if row not in stepped]
            rest = self._state.filter_batch(resting)
            new = rest if new is None else rest.merge_batch(new)
        self._state = new


def _logit_row(sampling: SamplingRow | None, path_ids: tuple[int, ...]) -> LogitRow:
    assert sampling is not None, "a row that chooses tokens says how"
    return LogitRow(sampling.params, sampling.prompt_ids, sampling.output_ids, path_ids)
