"""The flags of `paceline serve`: each setting has one, and it arrives."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from paceline.cluster.cli import main as cli
from paceline.cluster.cli import serve
from paceline.cluster.config import ClusterConfig


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
