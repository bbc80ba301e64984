"""The step loop on a CUDA device: every kernel set gives the tokens of transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.kernels.registry import available_kernel_sets
from paceline.worker.config import KernelSetName, SpecConfig
from paceline.worker.spec.ngram import NgramDrafter
from tests.models.test_step_loop_model import MAX_TOKENS, PROMPTS, Group
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
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=2,
            )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


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
    drafter = NgramDrafter(spec) if spec else None
    group = Group(
        model_dir,
        page_size=page_size,
        num_pages=2048 // page_size,
        chunked_prefill_size=8,
        drafter=drafter,
        spec=spec,
        kernels=kernels,
        device="cuda",
    )
    try:
        assert group.generate(PROMPTS) == expected
        assert group.generate(PROMPTS) == expected, "on a prefix hit"
    finally:
        group.close()
