"""CircuitBreaker: when to stop asking what does not answer, and when to try again. Pure."""


class CircuitBreaker:
    """Opens after consecutive failures; lets one probe through after each pause.

    Pauses double from `first_pause_s` to `max_pause_s`, so that what a probe may cost stays a
    small share of the time. The caller brings the time.
    """

    def __init__(
        self, *, max_failures: int = 3, first_pause_s: float = 1.0, max_pause_s: float = 30.0
    ) -> None:
        self._max_failures = max_failures
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._num_failures = 0
        self._pause_s = first_pause_s
        self._open_until_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._num_failures >= self._max_failures

    def allows(self, now_s: float) -> bool:
        return not self.is_open or now_s >= self._open_until_s

    def record_success(self) -> None:
        self._num_failures = 0
        self._pause_s = self._first_pause_s

    def record_failure(self, now_s: float) -> None:
        self._num_failures += 1
        if self.is_open:
            self._open_until_s = now_s + self._pause_s
            self._pause_s = min(self._pause_s * 2, self._max_pause_s)
