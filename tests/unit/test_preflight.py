"""A model or draft that cannot be served is refused at once: no process of Ray, and no torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.config import ClusterConfig, load_config
from paceline.cluster.preflight import resolve_models
from paceline.worker.errors import PacelineError
from tests.tiny import make_tiny_model
from tests.tiny_heads import HeadSizes, make_eagle3_head, make_eagle_head

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


def resolved(**settings: Any) -> ClusterConfig:  # Any: values of a ClusterConfig
    config = load_config(None, {k.replace("__", "."): v for k, v in settings.items()})
    return resolve_models(config, lambda process, stage, fraction: None)


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


# ---- what a draft is


def make_draft(kind: str, path: Path) -> Path:
    if kind == "eagle":
        return make_eagle_head(path).path
    if kind == "eagle3":
        return make_eagle3_head(path).path
    return make_tiny_model(path)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "standalone"])
@pytest.mark.parametrize("asked", ["auto", "as it is"])
def test_the_method_follows_from_what_the_draft_is(
    kind: str, asked: str, tiny_model: Path, tmp_path: Path
) -> None:
    draft = make_draft(kind, tmp_path / "draft")
    method = kind if asked == "as it is" else asked
    config = resolved(model=str(tiny_model), draft__model=str(draft), draft__method=method)
    assert (config.draft.method, config.draft.model) == (kind, str(draft))
    assert config.draft.is_decoupled == (kind == "standalone")
    again = resolve_models(config, lambda process, stage, fraction: None)
    assert again == config


@pytest.mark.parametrize("layout", ["midlayer", "model.layers", "fused", "bin"])
def test_a_head_that_calls_itself_a_llama_is_known_by_its_tensors(
    layout: Any, tiny_model: Path, tmp_path: Path
) -> None:
    head = make_eagle_head(tmp_path / "head", layout=layout)
    edit(architectures=["LlamaForCausalLM"])(head.path)
    assert resolved(model=str(tiny_model), draft__model=str(head.path)).draft.method == "eagle"


def test_a_standalone_draft_may_lie_with_its_target(tiny_model: Path, tiny_draft: Path) -> None:
    config = resolved(
        model=str(tiny_model), draft__model=str(tiny_draft), draft__placement="colocated"
    )
    assert config.draft.method == "standalone"
    assert config.draft.spec_config().is_colocated


@pytest.mark.parametrize("model", ["ngram", "none", ""])
def test_no_model_needs_no_draft(model: str, tiny_model: Path) -> None:
    config = resolved(model=str(tiny_model), draft__model=model)
    assert (config.draft.method, config.draft.model) == (model or "none", "")


def test_the_default_draft_of_a_built_in_model_is_its_catalogs(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> None:
    from paceline.cluster import preflight
    from paceline.cluster.models.catalog import BuiltIn

    head = make_eagle3_head(tmp_path / "head").path
    places = {"tiny": tiny_model, "tiny-head": head}
    known = {
        "tiny": BuiltIn("tiny", "", 1, "", "", draft="tiny-head", default_draft="auto"),
        "tiny-head": BuiltIn("tiny-head", "", 1, "", ""),
    }
    monkeypatch.setattr(preflight, "BUILT_IN", known)
    monkeypatch.setattr(preflight, "get_model", lambda name, progress: places[name])
    assert resolved(model="tiny").draft.model == "tiny-head"
    assert resolved(model="tiny").draft.method == "eagle3"
    assert resolved(model="tiny", draft__model="none").draft.method == "none"
    assert resolved(model="tiny", draft__method="none").draft.method == "none"
    known["tiny"] = BuiltIn("tiny", "", 1, "", "", draft="tiny-head", default_draft="ngram")
    assert resolved(model="tiny").draft.method == "ngram"
    assert resolved(model="tiny", draft__model="auto").draft.method == "eagle3"


def other_vocabulary(path: Path) -> Path:
    draft = make_tiny_model(path)
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    (first, last) = (min(vocab, key=vocab.get), max(vocab, key=vocab.get))
    vocab[first], vocab[last] = vocab[last], vocab[first]
    file.write_text(json.dumps(tokenizer))
    return draft


def narrow_head(path: Path) -> Path:
    return make_eagle3_head(path, HeadSizes(target_hidden_size=64)).path


def foreign_taps(path: Path) -> Path:
    sizes = HeadSizes(extra={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 99]}})
    return make_eagle3_head(path, sizes).path


def other_ids(path: Path) -> Path:
    head = make_eagle3_head(path).path
    edit(vocab_size=7)(head)
    return head


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (other_vocabulary, {}, "has another vocabulary than model"),
        (other_ids, {}, "is for a vocabulary of 7 tokens"),
        (narrow_head, {}, "use a head trained for"),
        (foreign_taps, {}, "99"),
        (make_eagle_head, {"method": "eagle3"}, "is a head of kind 'eagle', but the method asked"),
        (make_tiny_model, {"method": "eagle3"}, "is method standalone"),
        (make_eagle3_head, {"method": "standalone"}, "is a draft head"),
        (make_eagle3_head, {"placement": "decoupled"}, "a head reads its target's hidden states"),
        (make_eagle3_head, {"fallback": "ngram"}, "fallback is 'ngram'"),
        (make_eagle3_head, {"groups": 2}, "groups is 2"),
        (make_eagle3_head, {"token_map": "m.json"}, "an EAGLE-3 head brings its own"),
        (make_eagle_head, {"token_map": "/none/m.json"}, "token map '/none/m.json' cannot be read"),
        (make_tiny_model, {"overlap": "on"}, "method 'standalone' makes its drafts on the host"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused_with_the_reason(
    make: Callable[[Path], Any],
    settings: dict[str, Any],
    words: str,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    make(tmp_path / "draft")
    given = {f"draft__{name}": value for name, value in settings.items()}
    given = {"draft__model": str(tmp_path / "draft")} | given
    message = refusal(model=str(tiny_model), **given)
    assert words in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "is empty"),
        ('{"input_ids": [99999]}', "leads to token 99999, but the target has tokens 0 to"),
        ('{"texts": ["a"]}', "has neither"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(
    content: str | None, words: str, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "c.jsonl"
    if content is not None:
        file.write_text(content)
    message = refusal(model=str(tiny_model), draft__method="ngram", draft__ngram_corpus=str(file))
    assert words in message
    assert str(file) in message


def test_a_corpus_for_which_there_is_no_drafter_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "c.txt"
    file.write_text("a")
    message = refusal(model=str(tiny_model), draft__ngram_corpus=str(file))
    assert "no n-gram drafter guesses: method is 'none'" in message
    head = make_eagle3_head(tmp_path / "head").path
    message = refusal(
        model=str(tiny_model),
        draft__model=str(head),
        draft__fallback="ngram",
        draft__ngram_corpus=str(file),
    )
    assert "fallback is 'ngram'" in message


@pytest.mark.parametrize("draft", ["ngram", "standalone with a fallback"])
def test_the_path_of_a_corpus_is_made_absolute(
    draft: str,
    tiny_model: Path,
    tiny_draft: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "c.txt").write_text("to be or not to be")
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"draft__model": "ngram"}
    if draft != "ngram":
        settings = {"draft__model": str(tiny_draft), "draft__fallback": "ngram"}
    config = resolved(model=str(tiny_model), draft__ngram_corpus="c.txt", **settings)
    assert config.draft.spec_config().ngram_corpus == str(tmp_path / "c.txt")
    assert resolve_models(config, lambda process, stage, fraction: None) == config


def test_more_ranks_than_a_head_has_query_heads_are_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    head = make_eagle3_head(tmp_path / "h", HeadSizes(num_heads=2, num_kv_heads=1, head_dim=36))
    message = refusal(
        model=str(tiny_model), target__tensor_parallel_size=3, draft__model=str(head.path)
    )
    assert message.startswith(f"draft '{head.path}': tp_size is 3, ")
