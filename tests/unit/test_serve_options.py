"""The flags of `paceline serve`: each setting has one, and it arrives."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from paceline.cluster.cli import main as cli
from paceline.cluster.cli import serve
from paceline.cluster.config import ClusterConfig
from paceline.cluster.draft_config import DraftSection
from paceline.cluster.flags import flag_of


def settings(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted names of all settings."""
    names = []
    for name, field in section.model_fields.items():
        if isinstance(field.default, BaseModel):
            names += settings(type(field.default), f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def test_every_setting_has_a_flag() -> None:
    source = Path(serve.__file__).read_text()
    names = settings(ClusterConfig)
    assert len(names) > 40
    drafts = {name for name in names if name.startswith("draft.")}
    assert [name for name in names if name not in drafts and f'"{name}":' not in source] == []
    given = {name.partition(".")[2] for name in drafts} - {
        "method",
        "model",
    }  # these have their own
    assert [name for name in given if f"\n        {name}=" not in source] == []


def test_flag_that_a_message_names_exists() -> None:
    app = typer.Typer()
    app.command()(serve.serve)
    flags = {flag for param in typer.main.get_command(app).params for flag in param.opts}
    named = {flag_of(name) for name in settings(ClusterConfig) if name != "model"}
    assert named - flags == set()


def test_the_page_of_options_names_each_with_its_flag_and_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(--[\w-]+)` \| (\S+) \| (.+) \|$", page, re.MULTILINE)
    fields = DraftSection.model_fields
    assert [name for name, *_ in rows if name not in fields] == []
    said = {name: (flag, default.strip("`")) for name, flag, default, _ in rows}
    for name, field in fields.items():
        default = str(field.default or "empty") if isinstance(field.default, str) else field.default
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        assert said[name] == (flag_of(f"draft.{name}"), shown)


def served(*flags: str, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    got: list[ClusterConfig] = []
    monkeypatch.setattr(serve, "run_server", got.append)
    assert cli.run(["serve", "smollm2-135m", *flags]) == 0
    return got[0]


@pytest.mark.parametrize(
    ("flags", "setting", "expected"),
    [
        ("--draft-fallback ngram", "draft.fallback", "ngram"),
        ("--kv-cache-memory-bytes 1048576", "cache.max_bytes", 1048576),
        ("--start-timeout 12.5", "ray.start_timeout_s", 12.5),
        ("--draft-timeout-ms 500", "draft.timeout_s", 0.5),
        ("--speculative-num-steps 7", "draft.num_steps", 7),
        ("--speculative-eagle-topk 2", "draft.topk", 2),
        ("--speculative-topk 2", "draft.topk", 2),
        ("--speculative-num-draft-tokens 3", "draft.num_draft_tokens", 3),
        ("--no-spec-adaptive", "draft.adaptive", False),
        ("--no-speculative-adaptive", "draft.adaptive", False),
        ("--speculative-adaptive", "draft.adaptive", True),
        ("--spec-overlap off", "draft.overlap", "off"),
        ("--draft h --token-map m.json", "draft.token_map", "m.json"),
        ("--draft h --speculative-token-map m.json", "draft.token_map", "m.json"),
        ("--draft ngram --ngram-corpus c.txt", "draft.ngram_corpus", "c.txt"),
        ("--ngram-corpus c.txt", "draft.ngram_corpus", "c.txt"),
        (
            "--draft h --draft-fallback ngram --ngram-corpus c.txt",
            "draft.ngram_corpus",
            "c.txt",
        ),
        ("--draft h --spec-rule rejection", "draft.rule", "rejection"),
        (
            "--draft h --spec-rule rejection --spec-threshold-single 0.5",
            "draft.threshold_single",
            0.5,
        ),
        (
            "--draft h --spec-rule rejection --speculative-accept-threshold-acc 0.25",
            "draft.threshold_acc",
            0.25,
        ),
        ("--draft h --simulated-accept-length 2.5", "draft.simulated_accept_length", 2.5),
        ("--simulated-method multinomial", "draft.simulated_method", "multinomial"),
        ("--draft h --draft-placement colocated", "draft.placement", "colocated"),
        ("--draft h", "draft.method", "auto"),
        ("--draft h --speculative-algorithm EAGLE3", "draft.method", "eagle3"),
        ("--draft h --spec-method standalone", "draft.method", "standalone"),
        ("--speculative-draft-model-path h", "draft.model", "h"),
        ("--draft ngram", "draft.method", "ngram"),
        ("--draft ngram", "draft.model", ""),
        ("--draft none", "draft.method", "none"),
        ("--disable-cuda-graph", "cuda_graphs", False),
        ("--deterministic", "deterministic", True),
    ],
)
def test_a_flag_arrives(
    flags: str, setting: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = served(*flags.split(), monkeypatch=monkeypatch)
    assert attrgetter(setting)(config) == expected


def test_a_draft_on_the_command_line_wins_over_that_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[draft]\nmethod = "standalone"\nmodel = "d"\n')
    for draft, method, model in (("h", "auto", "h"), ("none", "none", ""), ("ngram", "ngram", "")):
        config = served("--config", str(file), "--draft", draft, monkeypatch=monkeypatch)
        assert (config.draft.method, config.draft.model) == (method, model)
