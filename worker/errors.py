"""The tree of errors that cross a boundary of ours.

    PacelineError
    ├── ConfigError        the deployment was asked for something that cannot be
    ├── InvalidRequest     one request was asked for something that cannot be (`field` names it)
    ├── NotFound           no such model or request
    ├── AlreadyExists      a request id that is running
    ├── Overloaded         refused now, welcome after `retry_after_s`
    ├── Unavailable        loading, draining, or a process died
    ├── DeadlineExceeded   the request's time ran out; `phase` says where
    ├── StaleEpoch         a message of a pairing that has ended
    └── InternalError      a promise of ours was broken

A message names the thing, the value, the limit and the way out. Every class hands all its
arguments to `super().__init__`, so an error survives pickling. `cluster/front/errors.py` maps
each to gRPC and HTTP, once.
"""


class PacelineError(Exception):
    """Root of the tree; never raised itself."""

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def __str__(self) -> str:
        return self.message


class ConfigError(PacelineError):
    """The deployment was asked for something that cannot be."""


class InvalidRequest(PacelineError):
    """One request was asked for something that cannot be."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message, field)
        self.field = field


class NotFound(PacelineError):
    """No such model or request."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message, field)
        self.field = field


class AlreadyExists(PacelineError):
    """A request id that is waiting or running."""


class Overloaded(PacelineError):
    """Refused at once; the same request may pass after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class Unavailable(PacelineError):
    """Loading, draining, or a process that served the request died."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PacelineError):
    """The request's time ran out in `phase` ("queue", "prefill" or "decode")."""

    def __init__(self, message: str, phase: str = "") -> None:
        super().__init__(message, phase)
        self.phase = phase


class StaleEpoch(PacelineError):
    """A message of a target-draft pairing that has ended."""


class InternalError(PacelineError):
    """A promise of ours was broken."""
