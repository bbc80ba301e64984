"""A model or draft that cannot be served is refused at once: no process of Ray, and no torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import load_config
from paceline.cluster.preflight import resolve_models
from paceline.worker.errors import PacelineError
from tests.tiny import make_tiny_model

Spoil = Callable[[Path], None]


def edit(**changes: Any) -> Spoil:  # Any: JSON
    def spoil(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return spoil


def remove(name: str) -> Spoil:
    return lambda model: (model / name).unlink()


def write(name: str, text: str) -> Spoil:
    def spoil(model: Path) -> None:
        (model / name).write_text(text)

    return spoil


def cut_short(model: Path) -> None:
    file = model / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


SPOILT = [
    (edit(architectures=["GPT2LMHeadModel"]), "supported are: LlamaForCausalLM"),
    (edit(quantization_config={"bits": 4}), "is quantized"),
    (edit(num_hidden_layers=0), "num_hidden_layers is 0, must be a positive count"),
    (write("config.json", "{"), "config.json' is not JSON"),
    (remove("model-00002-of-00002.safetensors"), "lacks the shard 'model-00002-of-00002"),
    (remove("model.safetensors.index.json"), "has neither model.safetensors nor"),
    (cut_short, "model-00002-of-00002.safetensors' is not a safetensors file"),
]


def refusal(**settings: Any) -> str:  # Any: values of a ClusterConfig
    config = load_config(None, {k.replace("__", "."): v for k, v in settings.items()})
    with pytest.raises(PacelineError) as caught:
        resolve_models(config, lambda process, stage, fraction: None)
    return caught.value.message


@pytest.mark.parametrize("role", ["model", "draft"])
@pytest.mark.parametrize(("spoil", "words"), SPOILT, ids=[words for _, words in SPOILT])
def test_checkpoint_that_cannot_be_served_is_refused(
    spoil: Spoil, words: str, role: str, tiny_model: Path, tmp_path: Path
) -> None:
    bad = make_tiny_model(tmp_path / "bad", num_shards=2)
    spoil(bad)
    if role == "model":
        message = refusal(model=str(bad))
    else:
        message = refusal(model=str(tiny_model), draft__method="standalone", draft__model=str(bad))
    assert words in message
    assert str(bad) in message


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("tokenizer.json"), "has no tokenizer.json; convert its tokenizer"),
        (write("tokenizer.json", "{}"), "tokenizer.json cannot be read as a tokenizer"),
        (write("tokenizer_config.json", "["), "tokenizer_config.json is not JSON"),
    ],
)
def test_model_without_a_tokenizer_that_can_be_read_is_refused(
    spoil: Spoil, words: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "bad")
    spoil(model)
    assert words in refusal(model=str(model))


def test_draft_without_a_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "bad")
    (draft / "tokenizer.json").unlink()
    message = refusal(model=str(tiny_model), draft__method="standalone", draft__model=str(draft))
    assert f"no tokenizer.json in '{draft}'" in message


def test_context_longer_than_the_checkpoint_has_positions_is_refused(tiny_model: Path) -> None:
    message = refusal(model=str(tiny_model), max_model_len=513)
    assert "max_model_len is 513, but the model in" in message
    assert "use 1 to 512" in message


@pytest.mark.parametrize("role", ["model", "draft"])
def test_more_ranks_than_query_heads_is_refused_with_both_numbers(
    role: str, tiny_model: Path
) -> None:
    settings: dict[str, Any] = {"model": str(tiny_model)}
    if role == "model":
        settings["target__tensor_parallel_size"] = 20
    else:
        settings |= {"draft__method": "standalone", "draft__model": str(tiny_model)}
        settings["draft__tensor_parallel_size"] = 20
    message = refusal(**settings)
    assert message.startswith(f"{role} '{tiny_model}': tp_size is 20, ")
    assert "9 query heads; use a tp_size of 1 to 9" in message


def test_checks_load_neither_torch_nor_ray(tiny_model: Path) -> None:
    code = (
        "import sys\n"
        "from paceline.cluster.config import load_config\n"
        "from paceline.cluster.preflight import resolve_models\n"
        "model = sys.argv[1]\n"
        "draft = {'draft.method': 'standalone', 'draft.model': model}\n"
        "resolve_models(load_config(None, {'model': model, **draft}), lambda *told: None)\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tiny_model)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
