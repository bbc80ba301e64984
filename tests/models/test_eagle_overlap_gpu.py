"""Steps launched ahead on a CUDA device: the tokens of plain decoding, and nothing read back."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from paceline.kernels.registry import available_kernel_sets
from paceline.worker.config import KernelSetName, SpecConfig, SpecMethod
from paceline.worker.graphs import CudaGraphs
from paceline.worker.spec.eagle_overlap import OverlapPath
from paceline.worker.step import PendingStep, SamplingParams, SpecShape, StepPlan
from paceline.worker.target.build import build_executor
from paceline.worker.target.executor import Executor
from tests.colocated import (
    GREEDY,
    SAMPLED,
    ColocatedReq,
    ColocatedTarget,
    config_of,
    default_shape,
    spec_config,
)
from tests.colocated_models import ColocatedModels, copy_without_last_layer
from tests.tiny import make_tiny_model
from tests.tiny_heads import HeadSizes, make_eagle3_head, make_eagle_head

pytestmark = pytest.mark.gpu

# One at least, so that elsewhere they are skipped for want of a device.
KERNEL_SETS = [name for name in available_kernel_sets("cuda") if name != "reference"] or ["triton"]
METHODS: tuple[SpecMethod, ...] = ("eagle", "eagle3", "standalone")
PROMPTS = [[5 + (i * 11) % 240 for i in range(n)] for n in (1, 7, 16, 33)]
ADJUSTED = replace(
    SAMPLED, frequency_penalty=0.4, repetition_penalty=1.3, min_tokens=9, logit_bias=((77, 3.0),)
)
PARAMS = [replace(ADJUSTED, max_tokens=19), GREEDY, replace(SAMPLED, max_tokens=9), SAMPLED]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> ColocatedModels:
    """Heads as wide as SmolLM2's; matrix units take no fewer than 16 columns."""
    path = tmp_path_factory.mktemp("gpu")
    sizes = HeadSizes(hidden_size=144, target_hidden_size=144, head_dim=64)
    target = make_tiny_model(
        path / "target", head_dim=64, hidden_size=144, weight_scale=0.18, faint_layers=(2,)
    )
    return ColocatedModels(
        target,
        {
            "eagle": make_eagle_head(path / "eagle", sizes).path,
            "eagle3": make_eagle3_head(path / "eagle3", sizes).path,
            "standalone": copy_without_last_layer(path / "standalone", target),
        },
    )


@pytest.fixture(scope="module")
def plain(models: ColocatedModels) -> list[list[int]]:
    return run(models.target, None, "triton", 16)[0]


def run(
    model: Path,
    spec: SpecConfig | None,
    kernels: KernelSetName,
    page_size: int,
    params: Sequence[SamplingParams] = PARAMS,
) -> tuple[list[list[int]], list[ColocatedReq]]:
    config = config_of(model, spec, page_size=page_size, kernels=kernels, device="cuda")
    executor = build_executor(config)
    target = ColocatedTarget(executor, chunk_size=8)
    reqs = target.make_reqs(PROMPTS, params)
    outputs = target.run(reqs)
    executor.shutdown()
    return outputs, reqs


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_both_paths_say_what_plain_decoding_says(
    models: ColocatedModels,
    plain: list[list[int]],
    kernels: KernelSetName,
    method: SpecMethod,
    topk: int,
    page_size: int,
    overlap: Literal["on", "off"],
) -> None:
    spec = spec_config(method, models.drafts[method], topk=topk, overlap=overlap)
    outputs, reqs = run(models.target, spec, kernels, page_size)
    assert outputs == plain
    if method == "standalone":
        assert sum(sum(req.accept_lengths) for req in reqs) > 0


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_launch_waits_for_nothing(
    models: ColocatedModels,
    plain: list[list[int]],
    kernels: KernelSetName,
    method: SpecMethod,
    topk: int,
) -> None:
    """Prompts, chunks, trees of any shape and all parameters: torch would raise at a sync."""
    spec = spec_config(method, models.drafts[method], topk=topk, overlap="auto")
    config = config_of(models.target, spec, page_size=16, kernels=kernels, device="cuda")
    executor = build_executor(config)
    assert executor.is_overlapped
    shapes = [default_shape(spec), SpecShape(0, topk, 1), SpecShape(2, 1, 3)]
    for is_watched in (False, True):  # the first time, kernels are compiled and tables made
        target = WatchedTarget(executor, is_watched, shapes)
        assert target.run(target.make_reqs(PROMPTS, PARAMS)) == plain
    executor.shutdown()


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_recorded_rounds_say_what_plain_decoding_says(
    models: ColocatedModels, kernels: KernelSetName, method: SpecMethod, topk: int
) -> None:
    """Recorded in the first run, repeated in the second, padded to four rows while there are three;
    neither waits for anything."""
    spec = spec_config(method, models.drafts[method], topk=topk, overlap="on")
    params = [
        replace(p, max_tokens=n)
        for p, n in zip([GREEDY, SAMPLED] * 2, (40, 48, 24, 32), strict=True)
    ]
    plain, _ = run(models.target, None, kernels, 16, params)
    config = config_of(models.target, spec, page_size=16, kernels=kernels, device="cuda")
    executor = build_executor(config)
    path = executor._path
    assert isinstance(path, OverlapPath)
    graphs = path._graphs
    assert isinstance(graphs, CudaGraphs)
    for is_watched in (False, True):
        target = WatchedTarget(executor, is_watched, [default_shape(spec)])
        assert target.run(target.make_reqs(PROMPTS, params)) == plain
        assert graphs.num_recorded > 0
    executor.shutdown()


class WatchedTarget(ColocatedTarget):
    def __init__(self, executor: Executor, is_watched: bool, shapes: Sequence[SpecShape]) -> None:
        super().__init__(executor, chunk_size=8, shapes=lambda step: shapes[step % len(shapes)])
        self._is_watched = is_watched

    def _launch(
        self, step: int, running: Sequence[ColocatedReq]
    ) -> tuple[PendingStep, list[ColocatedReq], StepPlan]:
        torch.cuda.set_sync_debug_mode("error" if self._is_watched else "default")
        try:
            return super()._launch(step, running)
        finally:
            torch.cuda.set_sync_debug_mode("default")
