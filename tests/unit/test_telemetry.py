"""Logging set-up of a process."""

import io
import logging
from collections.abc import Iterator

import pytest

from paceline.worker.telemetry import configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    logger = logging.getLogger("paceline")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield io.StringIO()
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def test_lines_name_their_process_and_come_once(stream: io.StringIO) -> None:
    configure_logging("target-0/0", stream=stream)
    configure_logging("target-0/1", stream=stream)  # a second set-up replaces the first
    logging.getLogger("paceline.worker.x").info("joined group tp_rank=%d", 1)
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("INFO paceline.worker.x process=target-0/1 joined group tp_rank=1")


def test_level_is_a_name_and_other_loggers_are_left_alone(stream: io.StringIO) -> None:
    root_handlers = logging.getLogger().handlers[:]
    configure_logging("front-0", "warning", stream)
    logging.getLogger("paceline.a").info("quiet")
    logging.getLogger("other").warning("not ours")
    assert stream.getvalue() == ""
    assert logging.getLogger().handlers == root_handlers
