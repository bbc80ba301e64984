"""The step loop on a CUDA device: every kernel set gives the tokens of transformers."""

from pathlib import Path

import pytest

from paceline.kernels.registry import available_kernel_sets
from paceline.worker.config import KernelSetName, SpecConfig
from paceline.worker.spec.ngram import NgramDrafter
from paceline.worker.target.build import build_executor
from tests.judge import Judge
from tests.loop_group import MAX_TOKENS, PROMPTS, LoopGroup
from tests.spec_harness import worker_config
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.gpu

KERNEL_SETS = available_kernel_sets("cuda")
CHAIN = SpecConfig(method="ngram")
TREE = SpecConfig(method="ngram", topk=2, num_draft_tokens=8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads as wide as SmolLM2's; matrix units take no fewer than 16 columns."""
    path = tmp_path_factory.mktemp("gpu") / "target"
    return make_tiny_model(path, head_dim=64, hidden_size=144, weight_scale=0.18)


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
