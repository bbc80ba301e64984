"""Waiting for what another thread or process does: asks again until a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: Callable[[], T], timeout_s: float = 30.0) -> T:
    """The first truthy answer. Raises: AssertionError: none in time."""
    give_up_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not (answer := what()):
        assert time.monotonic() < give_up_s, f"not true within {timeout_s:g} s"
        pause.wait(0.02)
    return answer
