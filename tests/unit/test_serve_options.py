"""The flags of `paceline serve`: each setting has one, and it arrives."""

from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from paceline.cluster.cli import main as cli
from paceline.cluster.cli import serve
from paceline.cluster.config import ClusterConfig
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
    assert [name for name in names if f'"{name}":' not in source] == []


def test_flag_that_a_message_names_exists() -> None:
    app = typer.Typer()
    app.command()(serve.serve)
    flags = {flag for param in typer.main.get_command(app).params for flag in param.opts}
    named = {flag_of(name) for name in settings(ClusterConfig) if name != "model"}
    assert named - flags == set()


@pytest.mark.parametrize(
    ("flag", "value", "setting"),
    [
        ("--draft-fallback", "ngram", "draft.fallback"),
        ("--kv-cache-memory-bytes", "1048576", "cache.max_bytes"),
        ("--start-timeout", "12.5", "ray.start_timeout_s"),
        ("--draft-timeout-ms", "500", "draft.timeout_s"),
    ],
)
def test_a_flag_arrives(
    flag: str, value: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[ClusterConfig] = []
    monkeypatch.setattr(serve, "run_server", got.append)
    assert cli.run(["serve", "smollm2-135m", flag, value]) == 0
    section, _, name = setting.partition(".")
    expected = {"draft.timeout_s": "0.5"}.get(setting, value)
    assert str(getattr(getattr(got[0], section), name)) == expected
