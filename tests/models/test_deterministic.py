"""`deterministic` in bf16: the logits behind a token are the same bits however its text came there.

Tiny models. That of the built-in one is tests/models/test_deterministic_smollm2.py.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.worker.config import (
    CacheConfig,
    KernelSetName,
    Overlap,
    SchedulerConfig,
    SpecConfig,
    SpecMethod,
    WorkerConfig,
)
from paceline.worker.draft.proposer import build_proposer
from paceline.worker.errors import ConfigError
from paceline.worker.link.local_link import LocalLink
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.drafter import Drafter
from paceline.worker.spec.limits import reserve_len
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.step import KvMoves, Phase, ReqStep
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.colocated_models import ColocatedModels, make_colocated_models
from tests.draft_host import draft_config
from tests.loop_group import GREEDY, PROMPTS, SAMPLED, LoopGroup
from tests.plans import make_rows, plan
from tests.tp import tp_executor

TEXT_LEN = 150  # more than two tiles of keys
TREE = SpecConfig(num_steps=3, topk=2, num_draft_tokens=8)
RULES = {"greedy": GREEDY, "seeded": replace(SAMPLED, top_p=1.0)}


def config_of(
    model: Path,
    spec: SpecConfig | None = None,
    *,
    deterministic: bool = True,
    kernels: KernelSetName = "auto",
    page_size: int = 16,
    num_pages: int = 96,
    chunked_prefill_size: int = 512,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 192,
) -> WorkerConfig:
    return WorkerConfig(
        model=load_model_config(model, max_model_len=max_model_len, dtype="bfloat16"),
        cache=CacheConfig(page_size=page_size, num_pages=num_pages),
        scheduler=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            chunked_prefill_size=chunked_prefill_size,
        ),
        spec=spec or SpecConfig(),
        kernels=kernels,
        num_threads=1,
        deterministic=deterministic,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    return make_colocated_models(tmp_path_factory.mktemp("deterministic"))


# ---- logits, by plans


def text_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 259), k=TEXT_LEN)


class Teller:
    """One row that computes a known text, in whatever pieces, and its neighbours."""

    def __init__(self, executor: Executor, seed: int) -> None:
        self._executor = executor
        self._rng = random.Random(seed)
        self._rows = make_rows(3, executor.num_pages, executor.page_size)
        self.text = text_of(seed)
        self._texts = [self.text, text_of(seed + 1), text_of(seed + 2)]
        self.logits: list[Tensor] = []

    @property
    def is_done(self) -> bool:
        return len(self.logits) == TEXT_LEN

    def step(self, kind: str, length: int, neighbours: Sequence[int]) -> None:
        """The next `length` tokens as a chunk, one by one, or on one path of a tree."""
        length = min(length, TEXT_LEN - len(self.logits))
        own, path = self._own(kind, length)
        steps = [own]
        for i, num_tokens in enumerate(neighbours, 1):
            start = self._rows[i].kv_len
            ids = self._texts[i][start : start + num_tokens]
            if ids:
                phase = Phase.DECODE if len(ids) == 1 else Phase.PREFILL
                steps.append(self._rows[i].step(ids, phase))
        steps.sort(key=lambda row: (row.phase == Phase.PREFILL, row.phase))
        first = sum(len(row.input_ids) for row in steps[: steps.index(own)])
        got = self._executor.forward(plan(*steps))
        assert got is not None
        self.logits += [got[first + node].clone() for node in path]
        self._move(own, path)

    def _own(self, kind: str, length: int) -> tuple[ReqStep, list[int]]:
        """The row's step, and the nodes of it that are the text."""
        row, start = self._rows[0], len(self.logits)
        ids = self.text[start : start + length]
        if kind != "tree" or length == 1:
            return row.step(ids, Phase.DECODE if length == 1 else Phase.PREFILL), [*range(length)]
        node_ids, parents, path = [ids[0]], [-1], [0]
        for token in ids[1:]:
            for _ in range(self._rng.randrange(3)):  # guesses that are wrong
                parents.append(self._rng.randrange(len(node_ids)))
                node_ids.append(self._rng.randrange(3, 259))
            parents.append(path[-1])
            path.append(len(node_ids))
            node_ids.append(token)
        step = row.step(node_ids, Phase.VERIFY, parents=tuple(parents), commit=length)
        return step, path

    def _move(self, own: ReqStep, path: list[int]) -> None:
        moved = [(node, i) for i, node in enumerate(path) if node != i]
        if moved:
            slots = self._executor._runner.req_to_token.host[own.req_pool_index]
            src = tuple(int(slots[own.prefix_len + node]) for node, _ in moved)
            tgt = tuple(int(slots[own.prefix_len + i]) for _, i in moved)
            self._executor.move_kv(KvMoves(src, tgt))


def tell_alone(executor: Executor, seed: int) -> Tensor:
    """Token by token."""
    teller = Teller(executor, seed)
    while not teller.is_done:
        teller.step("chunk", 1, ())
    return torch.stack(teller.logits)


@pytest.fixture(scope="module")
def executor(models: ColocatedModels) -> Iterator[Executor]:
    executor = build_executor(config_of(models.target))
    yield executor
    executor.shutdown()


@pytest.fixture(scope="module")
def alone(executor: Executor) -> dict[int, Tensor]:
    return {seed: tell_alone(executor, seed) for seed in (0, 10)}


PIECES = st.lists(
    st.tuples(
        st.sampled_from(["chunk", "tree", "one"]),
        st.integers(2, 70),
        st.lists(st.sampled_from([1, 2, 9, 40]), max_size=2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(seed=st.sampled_from([0, 10]), pieces=PIECES)
def test_logits_are_those_of_the_text_alone(
    executor: Executor,
    alone: dict[int, Tensor],
    seed: int,
    pieces: list[tuple[str, int, list[int]]],
) -> None:
    teller = Teller(executor, seed)
    while not teller.is_done:
        kind, length, neighbours = pieces[len(teller.logits) % len(pieces)]
        teller.step(kind, {"one": 1, "tree": min(length, 5)}.get(kind, length), neighbours)
    got = torch.stack(teller.logits)
    assert torch.equal(got, alone[seed]), (got != alone[seed]).any(1).nonzero()[:3]


def test_two_ranks_give_the_same_bits_in_any_company(models: ColocatedModels) -> None:
    with tp_executor(config_of(models.target), 2) as executor:
        alone = tell_alone(executor, 0)
        for pieces in ([("chunk", 150, [40])], [("tree", 5, [1, 9]), ("chunk", 37, [])]):
            teller = Teller(executor, 0)
            while not teller.is_done:
                teller.step(*pieces[len(teller.logits) % len(pieces)])
            assert torch.equal(torch.stack(teller.logits), alone)


def test_without_it_logits_differ_in_other_company(models: ColocatedModels) -> None:
    """Else the tests above would prove nothing."""
    executor = build_executor(config_of(models.target, deterministic=False))
    alone = tell_alone(executor, 0)
    teller = Teller(executor, 0)
    while not teller.is_done:
        teller.step("tree", 5, [1, 9])
    executor.shutdown()
    assert not torch.equal(torch.stack(teller.logits), alone)


# ---- tokens, by the step loop


@pytest.fixture(scope="module")
def plain(executor: Executor) -> dict[str, list[list[int]]]:
    """Every prompt alone, whole and without a draft."""
    found = {}
    for name, rule in RULES.items():
        outputs = []
        for i, prompt in enumerate(PROMPTS):
            group = LoopGroup(executor, max_num_seqs=1)
            outputs += group.generate([prompt], [replace(rule, seed=rule.seed + i)])
            group.close()
        found[name] = outputs
    return found


@contextmanager
def loop_group(
    config: WorkerConfig, drafter: Drafter | None = None, tp_size: int = 1
) -> Iterator[LoopGroup]:
    with tp_executor(config, tp_size) as executor:
        group = LoopGroup(executor, drafter)
        yield group
        group.close()


def check(group: LoopGroup, plain: dict[str, list[list[int]]]) -> None:
    """The second time prompts are found in the prefix cache."""
    for name, rule in RULES.items():
        for _ in range(2):
            assert group.generate(PROMPTS, rule) == plain[name]
        assert sum(receipt.cached_tokens for receipt in group.receipts()) > 0


@pytest.mark.parametrize(("page_size", "chunk_size"), [(16, 512), (1, 8), (16, 24)])
def test_a_batch_in_chunks_says_what_each_says_alone(
    models: ColocatedModels, plain: dict[str, list[list[int]]], page_size: int, chunk_size: int
) -> None:
    config = config_of(
        models.target,
        page_size=page_size,
        num_pages=1024 // page_size,
        chunked_prefill_size=chunk_size,
        max_num_batched_tokens=4 * chunk_size,
    )
    with loop_group(config) as group:
        check(group, plain)


def test_a_req_that_lost_its_pages_goes_on_with_the_same_tokens(
    models: ColocatedModels, plain: dict[str, list[list[int]]]
) -> None:
    config = config_of(models.target, page_size=1, num_pages=120, max_model_len=96)
    with loop_group(config) as group:
        for name, rule in RULES.items():
            assert group.generate(PROMPTS, rule) == plain[name]
        assert group.total("num_preemptions") > 0


def test_guesses_from_what_was_said_change_no_token(
    models: ColocatedModels, plain: dict[str, list[list[int]]]
) -> None:
    spec = replace(TREE, method="ngram")
    config = config_of(models.target, spec, chunked_prefill_size=8)
    with loop_group(config, NgramDrafter(spec)) as group:
        check(group, plain)
        assert group.total("accepted_tokens") > 0


def test_a_draft_in_another_place_changes_no_token(
    models: ColocatedModels, plain: dict[str, list[list[int]]]
) -> None:
    spec = replace(TREE, method="standalone", draft_timeout_s=30.0)
    draft = draft_config(models.drafts["standalone"], spec, num_pages=512, max_model_len=192)
    drafter = LinkDrafter(LocalLink(build_proposer(draft)), spec)
    with loop_group(config_of(models.target, spec, chunked_prefill_size=8), drafter) as group:
        check(group, plain)
        assert 0 < group.total("accepted_tokens") < group.total("proposed_tokens")


def colocated(
    models: ColocatedModels, method: SpecMethod, topk: int, overlap: Overlap
) -> SpecConfig:
    return SpecConfig(
        method=method,
        num_steps=3,
        topk=topk,
        num_draft_tokens=4 if topk == 1 else 7,
        draft_model=str(models.drafts[method]),
        placement="colocated",
        overlap=overlap,
        adaptive=False,
    )


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize(("method", "topk"), [("eagle", 1), ("eagle3", 3), ("standalone", 2)])
def test_a_draft_on_the_ranks_themselves_changes_no_token(
    models: ColocatedModels,
    plain: dict[str, list[list[int]]],
    method: SpecMethod,
    topk: int,
    overlap: Overlap,
) -> None:
    spec = colocated(models, method, topk, overlap)
    config = config_of(models.target, spec, num_pages=256, chunked_prefill_size=8)
    with loop_group(config) as group:
        check(group, plain)
        assert 0 < group.total("accepted_tokens") < group.total("proposed_tokens")


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_req_that_lost_its_pages_and_its_draft_goes_on_with_the_same_tokens(
    models: ColocatedModels, plain: dict[str, list[list[int]]], overlap: Overlap
) -> None:
    spec = colocated(models, "eagle3", 3, overlap)
    num_pages = 80 + 2 * reserve_len(spec, overlap == "on")
    config = config_of(models.target, spec, page_size=1, num_pages=num_pages, max_model_len=80)
    with loop_group(config) as group:
        for name, rule in RULES.items():
            assert group.generate(PROMPTS, rule) == plain[name]
        assert group.total("num_preemptions") > 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_two_ranks_with_a_draft_say_what_they_say_without(
    models: ColocatedModels, overlap: Overlap
) -> None:
    with loop_group(config_of(models.target), tp_size=2) as group:
        plain = {name: group.generate(PROMPTS, rule) for name, rule in RULES.items()}
    spec = colocated(models, "eagle3", 3, overlap)
    config = config_of(models.target, spec, num_pages=256, chunked_prefill_size=8)
    with loop_group(config, tp_size=2) as group:
        check(group, plain)


def test_kernels_without_such_a_form_are_refused(models: ColocatedModels) -> None:
    with pytest.raises(ConfigError, match="'triton' on device 'cpu' has no deterministic form"):
        build_executor(config_of(models.target, kernels="triton"))
