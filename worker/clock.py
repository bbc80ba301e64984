"""Time as an argument: the real clock, and one that tests move by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds, for durations."""
        ...

    def unix_s(self) -> float:
        """Seconds since the Unix epoch, for deadlines that cross processes."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class FakeClock:
    """Stands still until `advance` is called."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        self._now_s = start_s

    def monotonic(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds
