"""OverlapPath: draft, verify and draft extend of a step queued on the device without reading back.

What a step leaves for the next stays on the device by req_pool_index (`FutureRows`), so a step is
launched before the one before it is read, from lengths that the host knows to a bound only. A small
copy to the host, which `collect` waits for, says what became of it.

Knows neither when a req ends nor who owns a page: a req that has ended goes on for one step, in its
own row and pages, and whoever planned it drops the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.worker.batch import build_batch
from paceline.worker.config import WorkerConfig
from paceline.worker.dense_sampler import NO_TOKEN
from paceline.worker.errors import InternalError
from paceline.worker.parallel.collective import Collective
from paceline.worker.runner import Runner
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.device_batch import RowSpan, device_batch
from paceline.worker.spec.device_growth import DeviceGrowth
from paceline.worker.spec.future_rows import FutureRows, Rows, upload_ints
from paceline.worker.spec.limits import alloc_len_per_decode
from paceline.worker.spec.pending_overlap import PendingOverlap
from paceline.worker.spec.speculation_path import SpeculationPath
from paceline.worker.step import (
    PendingStep,
    Phase,
    ReqStep,
    SamplingRow,
    SpecShape,
    StepPlan,
)
from paceline.worker.target.device_rows import DeviceSampler

_PLAIN = SpecShape(num_steps=0, topk=1, num_draft_tokens=1)


class OverlapPath(SpeculationPath):
    """One rank's part."""

    is_overlapped = True

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        draft: ColocatedDraft,
        collective: Collective,
    ) -> None:
        table, model = runner.req_to_token, config.model
        self._topk = config.spec.topk
        # What the one step in flight may have committed behind a plan's prefix_len.
        self._lag = alloc_len_per_decode(config.spec)
        self._runner = runner
        self._draft = draft
        self._collective = collective
        self._device = table.table.device
        self._sampler: DeviceSampler | None = None  # tp_rank 0 alone chooses
        if collective.tp_rank == 0:
            self._sampler = DeviceSampler(
                runner.kernels,
                model.vocab_size,
                model.eos_token_ids,
                table.num_rows,
                self._device,
                config.spec,
            )
        self._state = FutureRows(table.num_rows, self._topk, self._device)
        self._growth = DeviceGrowth(draft, table, runner.kernels, collective, self._sampler)

    def launch(self, plan: StepPlan, sampling: Sequence[SamplingRow | None]) -> PendingStep:
        pending = self._step(plan, sampling)
        assert pending is not None, "only tp_rank 0 launches"
        return pending

    def follow(self, plan: StepPlan) -> None:
        self._step(plan, [None] * len(plan.rows))

    @torch.inference_mode()
    def _step(
        self, plan: StepPlan, sampling: Sequence[SamplingRow | None]
    ) -> PendingOverlap | None:
        self._runner.req_to_token.write_pages(plan.rows)
        rows = [replace(row, pages=()) for row in plan.rows]
        speculating = [row for row in rows if row.phase is Phase.SPECULATE]
        others = [(row, req) for row, req in zip(rows, sampling, strict=True) if _is_known(row)]
        verdict = known = pending = None
        if speculating:
            verdict = self._speculate(speculating, plan.shape or _PLAIN)
        if others:
            known = self._compute_known(plan.step_id, others)
        if self._sampler is not None:
            # Behind what the reply tells, in front of what only the next step needs.
            pending = PendingOverlap(
                plan,
                sampling,
                () if verdict is None else verdict.reported(),
                () if known is None else known.reported(),
                is_simulated=self._sampler.is_simulated,
            )
        if verdict is not None:
            self._extend(verdict)
        if known is not None:
            self._extend_known(plan.step_id, [row for row, _ in others], known)
        return pending

    # ---- rows that speculate

    def _speculate(self, rows: Sequence[ReqStep], shape: SpecShape) -> "_Verdict":
        """Grows trees, verifies them and brings the KV of what was accepted in line."""
        runner, kernels = self._runner, self._runner.kernels
        who = Rows.upload(tuple(row.req_pool_index for row in rows), self._device)
        start = self._state.look_up(who, shape.topk)
        seq_lens, root = start.new_seq_lens, start.verified_id
        assert seq_lens is not None
        assert root is not None
        max_lens = [row.prefix_len + self._lag for row in rows]
        grown = self._growth.grow(who, start, shape, max_lens)
        trees, bs, num_nodes = grown.trees, *grown.trees.draft_ids.shape
        span = RowSpan(who, seq_lens, num_nodes, max_lens)
        slots = span.slots(runner.req_to_token, kernels)
        batch = device_batch(
            span,
            trees.draft_ids,
            trees.positions.view(bs, num_nodes),
            slots,
            runner.req_to_token,
            kernels,
            tree_mask=trees.tree_mask.view(bs, num_nodes, num_nodes) if shape.topk > 1 else None,
        )
        out = runner.forward(batch, self._draft.capture)
        width = grown.max_depth + 1
        mine = logprobs = None
        if self._sampler is not None:
            assert out.logits is not None
            result = self._sampler.verify(
                out.logits, trees, who.index, who.index_cpu, seq_lens, grown.max_depth
            )
            logprobs = result.logprobs
            ids = result.predict[result.accept_index.clamp(min=0)]
            mine = torch.cat([ids, result.accept_index, result.accept_length[:, None]], 1)
        ids, accept_index, accept_length = self._agree(mine, (bs, 2 * width + 1)).split(
            [width, width, 1], 1
        )
        # A token that could not be chosen leaves its req where it stood.
        is_lost = ids.gather(1, accept_length) == NO_TOKEN
        num_new_tokens = (accept_length + 1 - is_lost.long())[:, 0]
        if shape.topk > 1:
            self._move_in_line(slots, accept_index)
        if self._sampler is not None:
            self._sampler.commit(who.index, ids, num_new_tokens)
        last_id = kernels.fill_new_verified_id(ids, num_new_tokens.clamp(min=1))
        self._state.store_ids(
            who, seq_lens + num_new_tokens, torch.where(num_new_tokens > 0, last_id, root)
        )
        roots = trees.links.retrieve_index[:, :1]
        path = torch.where(accept_index >= 0, accept_index, roots)  # [bs, width]
        hidden = self._features(out.hidden, bs * num_nodes)
        return _Verdict(
            who,
            seq_lens,
            max_lens,
            root[:, None],
            ids,
            accept_length[:, 0],
            num_new_tokens,
            grown.num_real,
            logprobs,
            hidden.index_select(0, path.flatten()),
        )

    def _move_in_line(self, slots: Tensor, accept_index: Tensor) -> None:
        """The target's KV of accepted nodes, to the slots behind their root's.

        slots [bs, num_draft_tokens], accept_index [bs, max_depth + 1].
        """
        nodes = accept_index[:, 1:]
        tgt = slots[:, 1 : accept_index.shape[1]]
        src = torch.where(nodes >= 0, slots.flatten()[nodes.clamp(min=0)], tgt)
        self._runner.kv.move(self._runner.kernels, src.flatten(), tgt.flatten())

    def _extend(self, verdict: "_Verdict") -> None:
        """The draft reads the new tokens, with the target's features of the path to them.

        As many tokens of each row as could have been accepted; what lies behind those that were is
        written again by the next step.
        """
        runner, draft = self._runner, self._draft
        # Unshifted, it reads the root again: its slot may not have been there before.
        ids = verdict.ids if draft.token_shift else torch.cat([verdict.roots, verdict.ids], 1)
        bs, width = ids.shape
        span = RowSpan(verdict.rows, verdict.seq_lens, width, verdict.max_lens)
        last = (verdict.num_new_tokens - draft.token_shift).clamp(min=0)
        steps = torch.arange(width, device=self._device)
        batch = device_batch(
            span,
            ids.clamp(min=0),
            verdict.seq_lens[:, None] + steps,
            span.slots(runner.req_to_token, runner.kernels, may_overrun=not draft.token_shift),
            runner.req_to_token,
            runner.kernels,
            logit_indices=torch.arange(bs, device=self._device) * width + last,
        )
        hidden = verdict.hidden if draft.token_shift else self._features(None, bs * width)
        out = draft.model.forward(batch, hidden, draft.kv)
        positions = verdict.seq_lens + verdict.num_new_tokens + 1
        self._store(verdict.rows, out.logits, out.hidden, positions)

    # ---- rows whose tokens the host knows

    def _compute_known(
        self, step_id: int, known: Sequence[tuple[ReqStep, SamplingRow | None]]
    ) -> "_Known":
        """A forward of prompt chunks and of single tokens, and the token behind those that end."""
        batch = self._runner.build(StepPlan(step_id, tuple(row for row, _ in known)))
        out = self._runner.forward(batch, self._draft.capture)
        ends = [(row, req) for row, req in known if row.num_logits]
        rows = Rows.upload(tuple(row.req_pool_index for row, _ in ends), self._device)
        lens = tuple(row.prefix_len + len(row.input_ids) for row, _ in ends)
        seq_lens = upload_ints(lens, self._device)
        mine = logprobs = None
        if self._sampler is not None and ends:
            assert out.logits is not None
            reqs = [req for _, req in ends if req is not None]
            assert len(reqs) == len(ends), "a row that ends comes with its sampling parameters"
            self._sampler.open_rows(rows.index_cpu, reqs)
            mine, logprobs = self._sampler.draw_with_logprobs(
                out.logits, rows.index, rows.index_cpu, seq_lens
            )
            # Where there was none, the req ends, but one step of it may be launched before that is
            # known: it goes on from any token, and its result is dropped.
            self._sampler.commit(rows.index, mine[:, None].clamp(min=0), torch.ones_like(mine))
        drawn = self._agree(mine, (len(ends),)) if ends else seq_lens
        self._state.store_ids(rows, seq_lens, drawn.clamp(min=0))
        return _Known(rows, seq_lens, drawn, logprobs, self._features(out.hidden, batch.num_tokens))

    def _extend_known(self, step_id: int, known: Sequence[ReqStep], computed: "_Known") -> None:
        """The draft reads the same tokens, each together with the one behind it."""
        runner, draft, num_tokens = self._runner, self._draft, 0
        table = runner.req_to_token
        rows: list[ReqStep] = []
        seeded: list[tuple[int, int]] = []  # rows that end, and where the token drawn there stands
        slotless: list[int] = []  # rows that end, but it has no slot yet: the next step reads it
        for row in known:
            is_end = row.num_logits != 0
            ids = (*row.input_ids, 0 if is_end else row.next_id)[draft.token_shift :]
            has_slots = row.prefix_len + len(ids) <= table.owned_len(row.req_pool_index)
            if not has_slots:
                ids = row.input_ids
            num_tokens += len(ids)
            end = len(seeded) + len(slotless)
            if is_end and has_slots:
                seeded.append((end, num_tokens - 1))
            elif is_end:
                slotless.append(end)
            rows.append(replace(row, input_ids=ids, num_logits=int(is_end)))
        batch = build_batch(StepPlan(step_id, tuple(rows)), table, runner.kernels)
        drawn = computed.drawn.clamp(min=0)
        for end, place in seeded:
            batch.input_ids[place] = drawn[end]
        hidden = computed.hidden if draft.token_shift else self._features(None, num_tokens)
        out = draft.model.forward(batch, hidden, draft.kv)
        if seeded or slotless:
            self._store(computed.rows, out.logits, out.hidden, computed.seq_lens + 1, slotless)

    # ---- both

    def _store(
        self,
        rows: Rows,
        logits: Tensor | None,
        hidden: Tensor | None,
        positions: Tensor,
        without: Sequence[int] = (),
    ) -> None:
        """What the draft said behind each row's last token.

        positions: [bs], of the tokens it guesses; without: rows that are to have no guesses.
        """
        assert hidden is not None
        self._state.store_hidden(rows, hidden)
        if self._sampler is not None:
            assert logits is not None
            probs, index = self._sampler.top_children(
                logits,
                rows.index,
                rows.index_cpu,
                positions,
                self._topk,
                self._draft.model.hot_token_id,
            )
            for b in without:
                probs[b] = -torch.inf
            self._state.store_candidates(rows, probs, index)

    def _features(self, hidden: Tensor | None, num_tokens: int) -> Tensor:
        """What the draft reads of the target; nothing, for one that reads tokens alone."""
        return torch.empty(num_tokens, 0, device=self._device) if hidden is None else hidden

    def _agree(self, mine: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """tp_rank 0's int64 on every rank."""
        if mine is None:
            mine = torch.empty(shape, dtype=torch.int64, device=self._device)
        assert mine.shape == shape, (mine.shape, shape)
        return self._collective.broadcast(mine)


def _is_known(row: ReqStep) -> bool:
    """Whether the host knows the tokens of a row."""
    if row.phase not in (Phase.SPECULATE, Phase.PREFILL, Phase.DECODE):
        raise InternalError(f"an overlapped step has no rows of {row.phase!r}")
    return row.phase is not Phase.SPECULATE


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What the target said of a batch of trees; `width` is how many tokens it could accept."""

    rows: Rows
    seq_lens: Tensor  # [bs], before
    max_lens: Sequence[int]  # at least those, on the host
    roots: Tensor  # [bs, 1]
    ids: Tensor  # [bs, width], the new tokens, then anything
    accept_length: Tensor  # [bs]
    num_new_tokens: Tensor  # [bs]
    num_real: Tensor | None  # [bs], drafts that were verified, on tp_rank 0; None: none were
    logprobs: Tensor | None  # [bs, width] fp32 of the new tokens, where a req wants them
    hidden: Tensor  # [bs * width, features], of the nodes that the new tokens follow

    def reported(self) -> list[Tensor]:
        """As `PendingOverlap` takes it."""
        num_real = self.num_real
        if num_real is None:
            num_real = torch.zeros_like(self.accept_length)
        logprobs = [] if self.logprobs is None else [self.logprobs]
        return [self.ids, self.accept_length, num_real, *logprobs]


@dataclass(frozen=True, slots=True)
class _Known:
    """The rows that end in a token of this step, and the features of all."""

    rows: Rows
    seq_lens: Tensor  # [n]
    drawn: Tensor  # [n]
    logprobs: Tensor | None  # [n] fp32 of the drawn tokens, where a req wants them
    hidden: Tensor  # [num_tokens, features]

    def reported(self) -> list[Tensor]:
        """As `PendingOverlap` takes it; nothing where no row ends."""
        if not self.rows.index_cpu:
            return []
        return [self.drawn, *([] if self.logprobs is None else [self.logprobs])]
