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
from paceline.worker.errors import InternalError
from paceline.worker.graphs import Graphs, padded_bs
from paceline.worker.parallel.collective import Collective
from paceline.worker.runner import Runner
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.device_growth import agree, max_depth, settle_shape
from paceline.worker.spec.future_rows import FutureRows, Rows, upload_ints
from paceline.worker.spec.limits import alloc_len_per_decode
from paceline.worker.spec.overlap_round import OverlapRound, RoundShape
from paceline.worker.spec.pending_overlap import PendingOverlap, Reported
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
_MIN_LEN = 256  # lengths are bounded by this or its double and so on, so that few rounds differ


class OverlapPath(SpeculationPath):
    """One rank's part."""

    is_overlapped = True

    def __init__(
        self,
        config: WorkerConfig,
        runner: Runner,
        draft: ColocatedDraft,
        collective: Collective,
        graphs: Graphs | None = None,
        *,
        is_dense: bool | None = None,
    ) -> None:
        """
        Args:
            graphs: repeat rounds; with a group of one rank only. None: each is launched anew.
            is_dense: as of `DeviceSampler`.
        """
        assert graphs is None or collective.tp_size == 1, "no recording of what ranks say"
        table, model = runner.req_to_token, config.model
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
                is_dense=is_dense,
            )
        topk = config.spec.topk
        self._state = FutureRows(table.num_rows, topk, self._device)
        self._round = OverlapRound(runner, draft, collective, self._sampler, self._state, topk)
        self._graphs = graphs
        self._rows: Rows | None = None
        self._rows_key: tuple[tuple[int, ...], tuple[int, ...]] = (), ()

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
        speculated = known = pending = None
        if speculating:
            speculated = self._speculate(speculating, plan.shape or _PLAIN)
        if others:
            known = self._compute_known(plan.step_id, others)
        if self._sampler is not None:
            # In front of what only the next step needs.
            pending = PendingOverlap(
                plan,
                sampling,
                speculated,
                None if known is None else known.reported,
                is_simulated=self._sampler.is_simulated,
            )
        if known is not None:
            self._extend_known(plan.step_id, [row for row, _ in others], known)
        return pending

    def _speculate(self, rows: Sequence[ReqStep], shape: SpecShape) -> Reported | None:
        """A round of the rows that grow trees."""
        index = tuple(row.req_pool_index for row in rows)
        trees = settle_shape(shape)
        longest = max(row.prefix_len for row in rows) + self._lag
        longest += max(span.end for span in self._round.spans(trees))
        kind, num_simulated = None, 0
        if self._sampler is not None:
            kind = self._sampler.kind(index)
            num_simulated = self._sampler.simulate_step(max_depth(trees))
        what = RoundShape(trees, _bound_of(longest), num_simulated)
        if self._graphs is None or kind is None:
            return self._round.run(self._upload(index), what)
        index += (0,) * (padded_bs(len(index)) - len(index))
        return self._graphs.run(
            (len(index), what, kind),
            self._upload(index).ints,
            lambda ints: self._round.run(Rows.of(ints, index), what),
        )

    def _upload(self, index: tuple[int, ...]) -> Rows:
        """The rows of reqs, as they lie on the device already if they were uploaded last."""
        owned_lens = tuple(self._runner.req_to_token.owned_len(row) for row in index)
        if self._rows is None or self._rows_key != (index, owned_lens):
            self._rows = Rows.upload(index, owned_lens, self._device)
            self._rows_key = index, owned_lens
        return self._rows

    # ---- rows whose tokens the host knows

    def _compute_known(
        self, step_id: int, known: Sequence[tuple[ReqStep, SamplingRow | None]]
    ) -> "_Known":
        """A forward of prompt chunks and of single tokens, and the token behind those that end."""
        batch = self._runner.build(StepPlan(step_id, tuple(row for row, _ in known)))
        out = self._runner.forward(batch, self._draft.capture)
        ends = [(row, req) for row, req in known if row.num_logits]
        rows = self._upload(tuple(row.req_pool_index for row, _ in ends))
        lens = tuple(row.prefix_len + len(row.input_ids) for row, _ in ends)
        seq_lens = upload_ints(lens, self._device)
        mine = reported = None
        if self._sampler is not None and ends:
            assert out.logits is not None
            reqs = [req for _, req in ends if req is not None]
            assert len(reqs) == len(ends), "a row that ends comes with its sampling parameters"
            self._sampler.open_rows(rows.index_cpu, reqs)
            mine, logprobs = self._sampler.draw_with_logprobs(
                out.logits, rows.index, rows.index_cpu, seq_lens
            )
            reported = Reported.of([mine[:, None]], None if logprobs is None else logprobs[:, None])
            # Where there was none, the req ends, but one step of it may be launched before that is
            # known: it goes on from any token, and its result is dropped.
            self._sampler.commit(rows.index, mine[:, None].clamp(min=0), torch.ones_like(mine))
        drawn = seq_lens
        if ends:
            drawn = agree(mine, (len(ends),), self._collective, self._device).clamp(min=0)
        hidden = self._round.features(out.hidden, batch.num_tokens)
        return _Known(rows, seq_lens, drawn, hidden, reported)

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
        for end, place in seeded:
            batch.input_ids[place] = computed.drawn[end]
        hidden = computed.hidden if draft.token_shift else self._round.features(None, num_tokens)
        out = draft.model.forward(batch, hidden, draft.kv)
        if seeded or slotless:
            self._round.store(computed.rows, computed.seq_lens, computed.drawn, out, slotless)


def _is_known(row: ReqStep) -> bool:
    """Whether the host knows the tokens of a row."""
    if row.phase not in (Phase.SPECULATE, Phase.PREFILL, Phase.DECODE):
        raise InternalError(f"an overlapped step has no rows of {row.phase!r}")
    return row.phase is not Phase.SPECULATE


def _bound_of(longest: int) -> int:
    bound = _MIN_LEN
    while bound < longest:
        bound *= 2
    return bound


@dataclass(frozen=True, slots=True)
class _Known:
    """The rows that end in a token of this step, and the features of all."""

    rows: Rows
    seq_lens: Tensor  # [n]
    drawn: Tensor  # [n], any where none could be chosen
    hidden: Tensor  # [num_tokens, features]
    reported: Reported | None  # on tp_rank 0, where a row ends
