"""The step loop on a CUDA device: every kernel set gives the tokens of transformers."""

from pathlib import Path

import pytest

from paceline.kernels.registry import available_kernel_sets
from paceline.worker.config import KernelSetName, SpecConfig, SpecMethod
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.target.build import build_executor
from tests.colocated_models import copy_without_last_layer
from tests.judge import Judge
from tests.loop_group import MAX_TOKENS, PROMPTS, LoopGroup
from tests.spec_harness import worker_config
from tests.tiny import make_tiny_model
from tests.tiny_heads import HeadSizes, make_eagle3_head

pytestmark = pytest.mark.gpu

KERNEL_SETS = available_kernel_sets("cuda")
# One at least, so that elsewhere tests are skipped for want of a device.
FAST_SETS = [name for name in KERNEL_SETS if name != "reference"] or ["triton"]
CHAIN = SpecConfig(method="ngram")
TREE = SpecConfig(method="ngram", topk=2, num_draft_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as wide as SmolLM2's; matrix units take no fewer than 16 columns."""
    path = tmp_path_factory.mktemp("gpu") / "target"
    return make_tiny_model(path, head_dim=64, hidden_size=144, weight_scale=0.18, faint_layers=(2,))


@pytest.fixture(scope="module")
def drafts(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[SpecMethod, Path]:
    path = tmp_path_factory.mktemp("drafts")
    sizes = HeadSizes(hidden_size=144, target_hidden_size=144, head_dim=64)
    return {
        "eagle3": make_eagle3_head(path / "eagle3", sizes).path,
        "standalone": copy_without_last_layer(path / "standalone", model_dir),
    }


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    return Judge(model_dir).outputs(PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("spec", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
def test_a_mixed_batch_gives_the_tokens_of_transformers(
    model_dir: Path,
    expected: list[list[int]],
    kernels: KernelSetName,
    page_size: int,
    spec: SpecConfig | None,
) -> None:
    config = worker_config(
        model_dir,
        spec=spec,
        page_size=page_size,
        num_pages=2048 // page_size,
        chunked_prefill_size=8,
        max_num_batched_tokens=96,
        kernels=kernels,
        device="cuda",
    )
    executor = build_executor(config)
    group = LoopGroup(executor, NgramDrafter(spec) if spec else None)
    try:
        assert group.generate(PROMPTS) == expected
        assert group.generate(PROMPTS) == expected, "on a prefix hit"
    finally:
        group.close()
        executor.shutdown()


@pytest.mark.parametrize(("page_size", "num_pages"), [(16, 128), (1, 140)])
@pytest.mark.parametrize(("method", "topk"), [("eagle3", 4), ("standalone", 1), ("standalone", 4)])
@pytest.mark.parametrize("kernels", FAST_SETS)
def test_steps_ahead_of_their_results_give_the_same_tokens(
    model_dir: Path,
    drafts: dict[SpecMethod, Path],
    expected: list[list[int]],
    kernels: KernelSetName,
    method: SpecMethod,
    topk: int,
    page_size: int,
    num_pages: int,
) -> None:
    """With few pages, reqs are preempted as well."""
    spec = SpecConfig(
        method=method,
        num_steps=3,
        topk=topk,
        num_draft_tokens=4 if topk == 1 else 8,
        draft_model=str(drafts[method]),
        placement="colocated",
    )
    config = worker_config(
        model_dir,
        spec=spec,
        page_size=page_size,
        num_pages=num_pages,
        chunked_prefill_size=8,
        max_num_batched_tokens=96,
        kernels=kernels,
        device="cuda",
    )
    executor = build_executor(config)
    assert executor.is_overlapped
    group = LoopGroup(executor)
    try:
        assert group.generate(PROMPTS) == expected
        assert group.generate(PROMPTS) == expected, "on a prefix hit"
        assert (group.total("num_preemptions") > 0) == (page_size == 1)
        if method == "standalone":
            assert group.total("accepted_tokens") > 0
    finally:
        group.close()
        executor.shutdown()
