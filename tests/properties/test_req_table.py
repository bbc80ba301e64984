"""The life of slots where the ranks draft, under any order of launches, results and ends.

A step writes from where its row really stands, which the host learns a step later, as far as a
step may; what is accepted stays, the rest is rolled back by being written again.
"""

from collections import deque
from dataclasses import dataclass
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.cluster.group.req_state import NewReq, ReqState
from paceline.cluster.group.req_table import NextStep, ReqTable
from paceline.cluster.group.step_rows import BuiltStep, StepRow, build_step
from paceline.worker.config import CacheConfig, SchedulerConfig, SpecConfig
from paceline.worker.spec.limits import alloc_len_per_decode, reserve_len
from paceline.worker.step import (
    PageId,
    Phase,
    ReqId,
    ReqStep,
    RowResult,
    SamplingParams,
    SpecShape,
    StepReply,
)

NUM_TOKENS = 48  # of the pool: two reqs get into each other's way
CHAIN = SpecConfig(method="eagle", num_steps=3, num_draft_tokens=4)
TREE = SpecConfig(method="eagle", num_steps=2, topk=3, num_draft_tokens=5)


@dataclass(frozen=True)
class Launched:
    step: BuiltStep
    reply: StepReply
    written: dict[int, tuple[PageId, ...]]  # by row


class TableMachine(RuleBasedStateMachine):
    """Plays the loop and the device: a step's results exist at its launch, and are told later."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        spec=st.sampled_from([CHAIN, TREE]),
        is_overlapped=st.booleans(),
    )
    def begin(self, page_size: int, spec: SpecConfig, is_overlapped: bool) -> None:
        self.page_size = page_size
        self.spec = spec
        self.is_overlapped = is_overlapped
        self.table = ReqTable(
            -(-NUM_TOKENS // page_size),
            CacheConfig(page_size=page_size),
            SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=20, chunked_prefill_size=6),
            40,
            (0,),
            is_speculating=True,
            reserve=reserve_len(spec, is_overlapped),
            key_shift=1,
        )
        self.in_flight: deque[Launched] = deque()
        self.num_reqs = 0
        self.step_id = 0
        # On the device, by row: how many tokens have KV, and which pages the row has.
        self.seq_lens: dict[int, int] = {}
        self.pages: dict[int, list[PageId]] = {}
        self.told: dict[ReqId, int] = {}  # output tokens that events brought

    @property
    def reqs(self) -> list[ReqState]:
        ids = (*self.table.running_ids(), *self.table.waiting_ids())
        return [req for req_id in ids if (req := self.table.get(req_id)) is not None]

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=16),
        max_tokens=st.integers(1, 30),
        is_same_id=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, is_same_id: bool) -> None:
        if len(prompt) >= self.table.max_model_len:
            return
        self.num_reqs += not is_same_id  # an id may come again once its req has ended
        req_id = ReqId(str(self.num_reqs))
        if self.table.get(req_id) is not None:
            return
        params = SamplingParams(seed=1, max_tokens=max_tokens)
        self.told[req_id] = 0
        assert self.table.add(ReqState(NewReq(req_id, prompt, [], params), 0.0, 0.0), 0.0) is None

    @precondition(lambda self: self.reqs)
    @rule(rand=st.randoms(use_true_random=False), num_steps=st.integers(1, 6))
    def run(self, rand: Random, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.in_flight) > int(self.is_overlapped):
                self.collect()
            self._launch(rand)
            self.no_page_is_lost_or_shared_wrongly()

    def _launch(self, rand: Random) -> None:
        next_step = self._plan()
        if next_step.must_wait:
            assert self.in_flight
            self.collect()
            next_step = self._plan()
            assert not next_step.must_wait
        if not next_step.rows:
            assert self.in_flight or next_step.preempted or not self.reqs
            return
        self.step_id += 1
        step = build_step(
            self.step_id,
            next_step.rows,
            {},
            next_step.shape,
            runs_ahead=self.is_overlapped,
        )
        self.table.launch(step)
        written: dict[int, tuple[PageId, ...]] = {}
        results = []
        for row, req_step in zip(step.rows, step.plan.rows, strict=True):
            written[req_step.req_pool_index], result = self._compute(
                row, req_step, step.plan.shape, rand
            )
            results.append(result)
        self.in_flight.append(Launched(step, StepReply(self.step_id, tuple(results)), written))

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        launched = self.in_flight.popleft()
        self._check_owned(launched)
        for event in self.table.apply(launched.step, launched.reply, 0.0):
            self.told[event.req_id] += len(event.new_ids)

    @precondition(lambda self: len(self.reqs) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """As an abort, a deadline or a client that left does."""
        req = data.draw(st.sampled_from(self.reqs))
        self.table.end(req)
        assert self.table.get(req.req_id) is None

    @invariant()
    def no_page_is_lost_or_shared_wrongly(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        for launched in self.in_flight:
            self._check_owned(launched)
        for req in self.reqs:
            assert self.told[req.req_id] == len(req.output_ids)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        while self.in_flight:
            self.collect()
        self.table.end_all(keep_prefix=True)
        self.table.check()
        counts = self.table.page_counts
        assert counts.num_free + counts.num_cached == counts.num_pages
        assert self.table.num_available_pages == counts.num_pages

    def _plan(self) -> NextStep:
        spec = self.spec
        shape = SpecShape(spec.num_steps, spec.topk, spec.num_draft_tokens)
        return self.table.plan(
            1, is_chain=spec.topk == 1, now_unix_s=0.0, choose_shape=lambda num_rows: shape
        )

    def _compute(
        self, row: StepRow, step: ReqStep, shape: SpecShape | None, rand: Random
    ) -> tuple[tuple[PageId, ...], RowResult]:
        """What a step does to a row on the device: the pages it writes to, and its result."""
        index = step.req_pool_index
        pages = self.pages[index] = (
            [
                *self.pages.get(index, [])[: step.page_start],
                *(PageId(page) for page in step.pages),
            ]
            if step.pages
            else self.pages[index]
        )
        assert pages == list(row.pages), "the row does not have its req's pages"
        if step.phase is not Phase.SPECULATE:
            start, stop = step.prefix_len, step.prefix_len + len(step.input_ids)
            if step.phase is Phase.DECODE:
                assert start == self.seq_lens[index]
            if step.num_logits:
                self.seq_lens[index] = stop
            result = RowResult((1,)) if step.num_logits else RowResult()
            return self._span(pages, start, stop), result
        assert shape is not None
        start = self.seq_lens[index]
        lag = start - step.prefix_len
        assert 0 <= lag <= (alloc_len_per_decode(self.spec) if self.is_overlapped else 0)
        num_nodes, num_steps = shape.num_draft_tokens, shape.num_steps
        span = self._span(pages, start, start + max(num_nodes, shape.topk * num_steps))
        if num_steps and rand.random() < 0.1:
            return span, RowResult(error="overflow", num_proposed=num_nodes - 1)
        accept_length = rand.randint(0, min(num_steps, num_nodes - 1))
        self.seq_lens[index] += accept_length + 1
        last = int(rand.random() > 0.08)  # 0 is the end
        new_ids = (*[1] * accept_length, last)
        return span, RowResult(new_ids, accept_length, num_proposed=num_nodes - 1)

    def _span(self, pages: list[PageId], start: int, stop: int) -> tuple[PageId, ...]:
        first, last = start // self.page_size, (stop - 1) // self.page_size
        assert last < len(pages), "a write behind what the row owns"
        return tuple(pages[first : last + 1])

    def _check_owned(self, launched: Launched) -> None:
        """From the launch to the collect the row has what the step writes, and nobody else."""
        table_pages = self.table._pages
        for index, written in launched.written.items():
            for page in written:
                assert page in table_pages.pages_of(index)
                assert table_pages._pool.num_refs(page) == 1


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
