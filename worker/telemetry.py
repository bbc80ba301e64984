"""Logging set-up of a process.

A log line is a short past-tense event and key=value pairs; counts go to metrics, not to logs.
"""

import logging
import sys
from typing import TextIO

_HANDLER_NAME = "paceline"
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s process=%(paceline_process)s %(message)s"


def configure_logging(
    process: str, level: str | int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Sends our loggers' lines to `stream` (stderr) once per process; safe to repeat.

    Only the logger "paceline" is touched: what a library or an embedding program logs is theirs.

    Args:
        process: who speaks, as "target-0/1"; part of every line.
        level: a name such as "debug", or a number of `logging`.
    """
    logger = logging.getLogger("paceline")
    for handler in list(logger.handlers):
        if handler.get_name() == _HANDLER_NAME:
            logger.removeHandler(handler)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.set_name(_HANDLER_NAME)
    handler.setFormatter(
        logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S", defaults={"paceline_process": process})
    )
    logger.addHandler(handler)
    logger.setLevel(level.upper() if isinstance(level, str) else level)
    logger.propagate = False
