"""The step loop with a real draft, near or far: speculation never changes a token."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.group.step_loop import ReqEvent
from paceline.worker.config import SpecConfig
from paceline.worker.draft.proposer import build_proposer
from paceline.worker.link.base import DraftLink
from paceline.worker.link.grpc_link import GrpcLink
from paceline.worker.link.local_link import LocalLink
from paceline.worker.spec.breaker import CircuitBreaker
from paceline.worker.spec.drafter import Drafter
from paceline.worker.spec.link_drafter import LinkDrafter
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.spec.vocab import vocab_hash
from paceline.worker.step import SamplingParams
from paceline.worker.target.build import build_executor
from tests.draft_host import draft_config, draft_host
from tests.faults import Faults, FaultyLink
from tests.loop_group import LoopGroup
from tests.spec_harness import worker_config
from tests.tiny import VOCAB_SIZE

CHAIN = SpecConfig(method="standalone", draft_timeout_s=5.0)
TREE = SpecConfig(method="standalone", num_steps=3, topk=2, num_draft_tokens=8, draft_timeout_s=5.0)
GREEDY = SamplingParams(seed=1, max_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(seed=40, max_tokens=24, temperature=0.8, top_p=0.9)
# Beside plain requests some with penalties, bias and minimum length, which no draft reproduces.
CHANGES = [
    {}, {"max_tokens": 1}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.7},
    {"logit_bias": ((7, 3.0),)}, {"min_tokens": 20}, {"max_tokens": 7}, {},
]  # fmt: skip
PROMPTS = [[70 + i] * (1 + 5 * i) for i in range(len(CHANGES))]


def generate(
    model: Path,
    params: SamplingParams,
    spec: SpecConfig | None = None,
    make_drafter: Callable[[], Drafter] | None = None,
    *,
    num_pages: int = 256,
) -> tuple[list[list[int]], list[ReqEvent]]:
    """All prompts at once. Returns their tokens and last events; every page has come back."""
    config = worker_config(model, spec=spec, num_pages=num_pages, chunked_prefill_size=8)
    executor = build_executor(config)
    group = LoopGroup(executor, make_drafter() if make_drafter else None)
    req_params = [
        replace(params, seed=params.seed + i, **changes)  # type: ignore[arg-type]  # per field
        for i, changes in enumerate(CHANGES)
    ]
    outputs = group.generate(PROMPTS, req_params)
    group.close()
    executor.shutdown()
    return outputs, [events[-1] for events in group.events.values()]


@contextmanager
def link_of(kind: str, model: Path, spec: SpecConfig) -> Iterator[DraftLink]:
    with ExitStack() as stack:
        if kind == "grpc":
            host = stack.enter_context(draft_host(model, spec))
            link: DraftLink = GrpcLink(
                host.address,
                target_group_id="target-0",
                vocab_hash=vocab_hash(model),
                vocab_size=VOCAB_SIZE,
                spec=spec,
            )
            stack.callback(link.shutdown)
            assert isinstance(link, GrpcLink)
            assert link.wait_until_up(10)
        else:
            link = LocalLink(build_proposer(draft_config(model, spec)))
        if kind == "faulty":
            link = FaultyLink(link, Faults.all(0.1), 3, VOCAB_SIZE)
        yield link


@pytest.mark.parametrize("kind", ["local", "grpc", "faulty"])
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_output_with_a_draft_is_output_without(
    tiny_model: Path, kind: str, spec: SpecConfig, params: SamplingParams
) -> None:
    expected, _ = generate(tiny_model, params)
    with link_of(kind, tiny_model, spec) as link:

        def make_drafter() -> Drafter:
            breaker = CircuitBreaker(max_failures=1 << 30)
            return LinkDrafter(
                link, spec, NgramDrafter(spec), vocab_size=VOCAB_SIZE, breaker=breaker
            )

        outputs, last = generate(tiny_model, params, spec, make_drafter)
    assert outputs == expected
    receipts = [event.receipt for event in last if event.receipt is not None]
    assert len(receipts) == len(PROMPTS)
    accepted = sum(receipt.accepted_tokens for receipt in receipts)
    proposed = sum(receipt.proposed_tokens for receipt in receipts)
    assert 0 < accepted <= proposed
    if kind != "faulty":
        assert accepted > 0.3 * proposed


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_preemption_with_a_draft_changes_no_token(tiny_model: Path, spec: SpecConfig) -> None:
    expected, _ = generate(tiny_model, SAMPLED)
    with link_of("local", tiny_model, spec) as link:
        outputs, last = generate(
            tiny_model, SAMPLED, spec, lambda: LinkDrafter(link, spec), num_pages=36
        )
    assert outputs == expected
    assert sum(event.receipt.num_preemptions for event in last if event.receipt) > 0
