"""StopSignals: what Ctrl-C and SIGTERM mean to a command that serves.

While it starts, the first one breaks the start off. While it serves, the first one asks for a
drain and the second for an end at once. `timeout` signals its command and then the group with the
command in it: what comes that close together was asked once.
"""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.1  # no person is that quick


class StopSignals:
    def __init__(self) -> None:
        self.asked = threading.Event()  # to stop
        self.hurry = threading.Event()  # to stop at once
        self.first: signal.Signals | None = None
        self._first_s = 0.0  # when it came
        self._is_starting = True
        self._before: dict[signal.Signals, Any] = {}  # Any: what signal.signal returns

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def install(self) -> None:
        """Takes the signals (again: connecting to Ray takes SIGTERM)."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def begin_serving(self) -> None:
        self._is_starting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.first is not None:
            if number != self.first or now_s - self._first_s > _SAME_S:
                self.hurry.set()
            return
        self.first, self._first_s = signal.Signals(number), now_s
        self.asked.set()
        if self._is_starting:
            raise KeyboardInterrupt
