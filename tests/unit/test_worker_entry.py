"""The entry of a rank: its configuration in the environment, and how it fails."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.worker.config import ParallelConfig, SpecConfig, WorkerConfig
from paceline.worker.entry import config_from_env, decode_config, encode_config, main
from paceline.worker.errors import ConfigError
from paceline.worker.models.registry import load_model_config


@pytest.fixture
def config(tiny_model: Path) -> WorkerConfig:
    return WorkerConfig(load_model_config(tiny_model), spec=SpecConfig(method="ngram", num_steps=5))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("paceline")
    handlers, propagate, level = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


def test_a_config_survives_the_environment(config: WorkerConfig) -> None:
    env = {"PACELINE_WORKER_CONFIG": encode_config(config)}
    assert config_from_env(env) == config


def test_an_absent_config_is_named() -> None:
    with pytest.raises(ConfigError, match="PACELINE_WORKER_CONFIG is not set"):
        config_from_env({})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"tp_size":1', '"tp_size":"two"', "parallel.tp_size"),
        ('"method":"ngram"', '"method":"magic"', "spec.method"),
        ("{", "", "not a worker's config"),
    ],
)
def test_a_wrong_config_names_its_field(
    config: WorkerConfig, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_config(encode_config(config).replace(old, new, 1))


def test_a_rank_that_cannot_start_logs_why_and_fails(
    config: WorkerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = replace(
        config,
        parallel=ParallelConfig(
            tp_size=2, tp_rank=1, backend="gloo", rendezvous="127.0.0.1:1", timeout_s=0.5
        ),
    )
    env = {"PACELINE_WORKER_CONFIG": encode_config(alone), "PACELINE_WORKER_GROUP": "draft-7"}
    assert main(env) == 1
    err = capsys.readouterr().err
    assert "process=draft-7" in err
    assert "Unavailable: tp_rank 1 of 2: rendezvous at 127.0.0.1:1" in err


def test_a_draft_leader_needs_an_address(
    config: WorkerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main({"PACELINE_WORKER_CONFIG": encode_config(config)}) == 1
    assert "PACELINE_WORKER_LISTEN is ''" in capsys.readouterr().err


def test_the_entry_loads_no_torch_before_it_has_set_its_environment() -> None:
    code = "import sys, paceline.worker.entry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
