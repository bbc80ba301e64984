"""How a start is shown: a live table on a terminal, plain lines elsewhere; on stderr either way."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_GAP_S = 0.5  # between two plain lines of one process and stage


class StartProgress:
    """Told (process, stage, fraction of the stage) by a start; shows the latest of each process."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last: dict[str, tuple[str, float]] = {}  # stage, and when it was printed

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            self._bars = Progress(
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.description:<16}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[stage]}"),
                Elapsed(),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            if exc is None:  # what was seen last may be older than the end
                for task in self._tasks.values():
                    self._bars.update(task, stage="ready", completed=1.0)
            self._bars.stop()

    def tell(self, process: str, stage: str, fraction: float) -> None:
        if self._bars is None:
            self._print(process, stage)
            return
        is_ready = stage == "ready"
        if process not in self._tasks:
            self._tasks[process] = self._bars.add_task(process, total=1.0, stage=stage)
        # Only "ready" is an end: a stage that is done makes room for the next.
        done = 1.0 if is_ready else min(fraction, 0.99)
        self._bars.update(self._tasks[process], stage=stage, completed=done)

    def _print(self, process: str, stage: str) -> None:
        now_s = time.monotonic()
        last_stage, printed_s = self._last.get(process, ("", 0.0))
        if stage == last_stage or (stage != "ready" and now_s - printed_s < _LINE_GAP_S):
            return
        self._last[process] = (stage, now_s)
        print(f"{now_s - self._began_s:6.1f}s {process}: {stage}", file=sys.stderr, flush=True)
