"""A target that hands over hidden states and a head that reads them, without a step loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.worker.batch import build_batch
from paceline.worker.cache.kv_buffer import KvBuffer, KvShape
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.config import CacheConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from paceline.worker.models.draft_head import DraftHead, build_head
from paceline.worker.models.eagle_config import EagleConfig, load_eagle_config
from paceline.worker.models.hidden import ForwardOutput, HiddenCapture
from paceline.worker.models.registry import load_model_config
from paceline.worker.runner import Runner
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.step import Phase, ReqStep
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.plans import Row, make_rows, plan

PAGE_SIZE, NUM_PAGES = 16, 64
FULL, LAST = CaptureHiddenMode.FULL, CaptureHiddenMode.LAST


def target_config(path: Path, max_model_len: int = 512) -> WorkerConfig:
    return WorkerConfig(
        load_model_config(path, max_model_len=max_model_len, dtype="float32"),
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES),
        scheduler=SchedulerConfig(max_num_seqs=4),
        parallel=ParallelConfig(),
        num_threads=1,
    )


def build_target(path: Path) -> Executor:
    return build_executor(target_config(path))


@dataclass(frozen=True)
class HeadRunner:
    """A head with KV of its own; its rows lie in `req_to_token` as its target's do."""

    config: EagleConfig
    head: DraftHead
    target: Runner
    kv: KvBuffer
    req_to_token: ReqToToken

    @torch.inference_mode()
    def forward(
        self, hidden: Tensor, *rows: ReqStep, mode: CaptureHiddenMode = LAST
    ) -> ForwardOutput:
        batch = build_batch(plan(*rows), self.req_to_token, self.target.kernels)
        return self.head.forward(batch, hidden, self.kv, mode)

    def target_ids(self, ids: Tensor) -> Tensor:
        hot = self.head.hot_token_id
        return ids if hot is None else hot[ids]


def build_head_runner(executor: Executor, path: Path, token_map: str = "") -> HeadRunner:
    target = executor._runner
    config = load_eagle_config(path, executor.config.model)
    width = target.req_to_token.width
    head = build_head(
        config, target.model, executor._collective, target.kernels, width, token_map=token_map
    )
    shape = KvShape(head.num_layers, len(head.heads.kvs), config.model.head_dim, torch.float32)
    return HeadRunner(
        config,
        head,
        target,
        KvBuffer(shape, NUM_PAGES, PAGE_SIZE, "cpu"),
        ReqToToken(5, width, PAGE_SIZE, "cpu"),
    )


def new_row() -> Row:
    return make_rows(1, NUM_PAGES, PAGE_SIZE)[0]


def run(runner: Runner, capture: HiddenCapture, *rows: ReqStep) -> ForwardOutput:
    return runner.forward(runner.build(plan(*rows)), capture)


@dataclass(frozen=True)
class Truth:
    """What a target said, greedily, and the features of every token it computed."""

    ids: list[int]  # prompt, then output
    num_prompt: int
    features: Tensor  # [len(ids) - 1, width]


def decode_greedily(
    runner: Runner, capture: HiddenCapture, prompt: Sequence[int], max_tokens: int, eos: int
) -> Truth:
    row = new_row()
    step = run(runner, capture, row.step(prompt, num_logits=1))
    features = [step.hidden]
    ids = list(prompt)
    while True:
        assert step.logits is not None
        ids.append(int(step.logits[-1].argmax()))
        if ids[-1] == eos or len(ids) - len(prompt) == max_tokens:
            return Truth(ids, len(prompt), torch.cat([x for x in features if x is not None]))
        step = run(runner, capture, row.step(ids[-1:], Phase.DECODE))
        features.append(step.hidden)


def accept_lengths(drafts: HeadRunner, truth: Truth, num_steps: int, max_tokens: int) -> list[int]:
    """Chains of `num_steps` drafts against what the target says, from the prompt's end on.

    The head first reads the features of what was committed, each with the token behind it, then its
    own; a step commits the accepted drafts and the target's next token.
    """
    found: list[int] = []
    row = new_row()
    commit_len = truth.num_prompt + 1  # the prompt and the target's first token
    while commit_len < min(truth.num_prompt + max_tokens, len(truth.ids)):
        # Features exist of all committed tokens but the last.
        start, stop = row.kv_len, commit_len - 1
        shifted = truth.ids[start + 1 : commit_len]
        out = drafts.forward(truth.features[start:stop], row.step(shifted, num_logits=1))
        chain: list[int] = []
        while True:
            assert out.logits is not None
            assert out.hidden is not None
            chain.append(int(drafts.target_ids(out.logits[-1].argmax())))
            if len(chain) == num_steps:
                break
            out = drafts.forward(out.hidden, row.step(chain[-1:], Phase.DECODE))
        row.kv_len = stop  # what the drafts wrote is behind what is committed
        said = truth.ids[commit_len : commit_len + num_steps]
        agreed = [draft == token for draft, token in zip(chain, said, strict=False)]
        found.append(agreed.index(False) if False in agreed else len(agreed))
        commit_len += found[-1] + 1
    return found


def assert_close(got: Tensor | None, want: Tensor, tolerance: float = 1e-5) -> None:
    """`tolerance` is of the largest value."""
    assert got is not None
    scale = max([1.0, *want.abs().flatten().tolist()])
    torch.testing.assert_close(got / scale, want / scale, atol=tolerance, rtol=tolerance)
