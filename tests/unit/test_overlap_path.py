"""One overlapped step after the other under models that say what a table says, slot by slot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from paceline.kernels.reference.kernel_set import ReferenceKernels
from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer, KvShape
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.config import CacheConfig, ModelConfig, SpecConfig, WorkerConfig
from paceline.worker.errors import InternalError
from paceline.worker.models.draft_head import DraftHead
from paceline.worker.models.hidden import ForwardOutput, HiddenCapture
from paceline.worker.parallel.local import LocalCollective
from paceline.worker.runner import Runner
from paceline.worker.spec.colocated_draft import ColocatedDraft
from paceline.worker.spec.eagle_overlap import OverlapPath
from paceline.worker.spec.limits import reserve_len
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.step import (
    PendingStep,
    Phase,
    ReqStep,
    RowResult,
    SamplingParams,
    SamplingRow,
    SpecShape,
    StepPlan,
)

VOCAB_SIZE = 128
ROW = 1
BROKEN = -1  # in a table: no logit behind this token is a number
GREEDY = SamplingParams(seed=1, max_tokens=100, temperature=0.0)


@dataclass
class Forward:
    """What a model was asked: per token its id, position, slot; the features it was handed."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    features: list[int] = field(default_factory=list)
    logit_indices: list[int] | None = None


class Table:
    """Says table[id] behind each token, or the next number; hands the ids it read over as features.

    `calls` are its forwards.
    """

    def __init__(self, table: Mapping[int, int]) -> None:
        self._table = table
        self.calls: list[Forward] = []

    def say(self, batch: Batch, features: Tensor | None) -> ForwardOutput:
        chosen = batch.logit_indices
        call = Forward(
            batch.input_ids.tolist(), batch.positions.tolist(), batch.out_cache_loc.tolist()
        )
        call.features = [] if features is None else features[:, 0].int().tolist()
        call.logit_indices = None if chosen is None else chosen.tolist()
        self.calls.append(call)
        said = [self._table.get(token, token + 1) for token in call.ids]
        logits = torch.zeros(len(said), VOCAB_SIZE)
        for row, token in enumerate(said):
            if token == BROKEN:
                logits[row] = torch.nan
            else:
                logits[row, token] = 9.0
        hidden = batch.input_ids[:, None].float()
        return ForwardOutput(logits if chosen is None else logits[chosen], hidden)


class TableTarget(Table):
    def forward(self, batch: Batch, kv: KvBuffer, capture: HiddenCapture) -> ForwardOutput:
        assert capture.mode is CaptureHiddenMode.FULL
        return self.say(batch, None)


class TableHead(Table, DraftHead):
    vocab_size = VOCAB_SIZE
    hot_token_id = None

    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        kv: KvBuffer,
        mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> ForwardOutput:
        out = self.say(batch, hidden)
        assert out.hidden is not None
        chosen = batch.logit_indices
        return ForwardOutput(out.logits, out.hidden if chosen is None else out.hidden[chosen])


class Rig:
    """A path over tables, pages of one token each, and one req in row 1."""

    def __init__(
        self, target: Mapping[int, int], head: Mapping[int, int], spec: SpecConfig, prompt: range
    ) -> None:
        model = ModelConfig(
            path="", architecture="", vocab_size=VOCAB_SIZE, hidden_size=1, intermediate_size=1,
            num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, max_model_len=64,
            rms_norm_eps=1e-5, rope_theta=1e4,
        )  # fmt: skip
        self.target, self.head = TableTarget(target), TableHead(head)
        self.prompt, self.output = list(prompt), list[int]()
        self._spec = spec
        self._num_pages = 0
        kernels = ReferenceKernels()
        shape = KvShape(1, 1, 2, torch.float32)
        table = ReqToToken(3, 128, page_size=1, device="cpu")
        runner = Runner(self.target, KvBuffer(shape, 99, 1, "cpu"), table, kernels)  # type: ignore[arg-type]  # as far as a path looks at it
        capture = HiddenCapture(CaptureHiddenMode.FULL)
        draft = ColocatedDraft("eagle", self.head, KvBuffer(shape, 99, 1, "cpu"), capture, 1)
        config = WorkerConfig(model, cache=CacheConfig(page_size=1, num_pages=99), spec=spec)
        self.path = OverlapPath(config, runner, draft, LocalCollective())

    @property
    def state(self) -> tuple[int, int]:
        """(seq_len, verified_id) on the device."""
        seq_len, verified_id, *_ = self.path._state._ints[:, ROW].tolist()
        return seq_len, verified_id

    def launch(self, row: ReqStep) -> PendingStep:
        """One row, which gets the pages that its prefix and its reserve want."""
        spec = self._spec
        reserve = reserve_len(spec, overlap=True) if row.phase is Phase.SPECULATE else 1
        stop = row.prefix_len + max(reserve, len(row.input_ids))
        pages = tuple(range(self._num_pages + 1, stop + 1))
        row = ReqStep(
            ROW, row.phase, row.prefix_len, row.input_ids, self._num_pages, pages,
            num_logits=row.num_logits,
        )  # fmt: skip
        self._num_pages = max(self._num_pages, stop)
        shape = SpecShape(spec.num_steps, spec.topk, spec.num_draft_tokens)
        sampling = SamplingRow(GREEDY, self.prompt, self.output)
        return self.path.launch(StepPlan(0, (row,), shape), [sampling])

    def prefill(self) -> None:
        prompt = ReqStep(ROW, Phase.PREFILL, 0, tuple(self.prompt), num_logits=1)
        self.collect(self.launch(prompt))

    def speculate(self, prefix_len: int = -1) -> PendingStep:
        """prefix_len: as the host knows it; -1: all that was collected."""
        known = len(self.prompt) + len(self.output) - 1
        return self.launch(
            ReqStep(ROW, Phase.SPECULATE, known if prefix_len < 0 else prefix_len, ())
        )

    def collect(self, pending: PendingStep) -> RowResult:
        (result,) = pending.collect().rows
        self.output += result.new_ids
        return result


def chain(num_steps: int) -> SpecConfig:
    return SpecConfig(method="eagle", num_steps=num_steps, topk=1, num_draft_tokens=num_steps + 1)


def test_a_round_of_one_branch_by_hand() -> None:
    """Slots, positions and pairs of features and tokens of each forward."""
    rig = Rig({52: 60, 61: 70, 62: 99}, {}, chain(2), range(50, 53))
    rig.prefill()
    assert rig.output == [60]
    (extend,) = rig.head.calls
    assert extend == Forward([51, 52, 60], [0, 1, 2], [1, 2, 3], [50, 51, 52], [2])

    rig.target.calls.clear()
    rig.head.calls.clear()
    result = rig.collect(rig.speculate())
    assert (result.new_ids, result.accept_length, result.num_proposed) == ((61, 70), 1, 2)
    (verify,) = rig.target.calls
    assert verify == Forward([60, 61, 62], [3, 4, 5], [4, 5, 6])
    draft, extend = rig.head.calls
    assert draft == Forward([61], [3], [4], [60])
    # The last place is behind what was accepted; its id and features are anything.
    assert (extend.ids[:2], extend.features[:2]) == ([61, 70], [60, 61])
    assert (extend.positions, extend.slots) == ([3, 4, 5], [4, 5, 6])
    assert extend.logit_indices == [1]
    assert rig.state == (5, 70)


def test_lengths_grow_on_the_device_by_what_was_accepted_within_what_is_owned() -> None:
    """One step ahead of the host. A slot that the row does not own would be refused."""
    prompt = range(10, 15)
    wrong = {17: 90, 18: 90, 20: 90}
    rig = Rig({}, wrong, chain(3), prompt)
    rig.prefill()
    assert rig.state == (5, 15)
    pending = rig.speculate()
    found = []
    for seq_len in (8, 9, 11):
        assert rig.state[0] == seq_len
        behind, pending = pending, rig.speculate()  # the host lacks what the last step committed
        found.append(rig.collect(behind).accept_length + 1)
    assert found == [3, 1, 2]
    assert rig.output == list(range(15, 22))


def test_a_step_that_lags_further_than_its_slots_reach_is_refused() -> None:
    rig = Rig({}, {}, chain(3), range(10, 15))
    rig.prefill()
    pending = [rig.speculate(5), rig.speculate(5)]
    with pytest.raises(AssertionError, match="no slot of its own"):
        rig.speculate(5)
    assert [rig.collect(step).accept_length for step in pending] == [3, 3]


def test_broken_logits_cost_a_row_what_is_behind_them_alone() -> None:
    rig = Rig({16: BROKEN}, {}, chain(2), range(10, 15))
    rig.prefill()
    result = rig.collect(rig.speculate())
    assert (result.new_ids, result.accept_length) == ((16,), 0)
    assert "no finite maximum" in result.error
    assert rig.state == (6, 16), "the token in front of them is the root of the next tree"
    result = rig.collect(rig.speculate())
    assert (result.new_ids, rig.state) == ((), (6, 16))
    assert result.error


def test_a_single_token_that_the_host_knows_is_decoded_and_drafted_from() -> None:
    """As after an error, when a req gets a step without guesses."""
    rig = Rig({}, {}, chain(2), range(10, 15))
    rig.prefill()
    rig.head.calls.clear()
    result = rig.collect(rig.launch(ReqStep(ROW, Phase.DECODE, 5, (15,))))
    assert (result.new_ids, result.num_proposed) == ((16,), 0)
    assert rig.head.calls == [Forward([16], [5], [6], [15])]
    assert rig.state == (6, 16)
    assert rig.collect(rig.speculate()).new_ids == (17, 18, 19)


def test_a_tree_of_the_host_has_no_place_in_an_overlapped_step() -> None:
    rig = Rig({}, {}, chain(2), range(10, 15))
    rig.prefill()
    with pytest.raises(InternalError, match="VERIFY"):
        rig.launch(ReqStep(ROW, Phase.VERIFY, 5, (15, 16), parents=(-1, 0)))
