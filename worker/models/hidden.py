"""Hidden states on their way out of a forward: which are wanted, and the buffer they leave in.

A tap is the index of the layer a state enters; the number of layers is the state behind the last.
"""

from dataclasses import dataclass

from torch import Tensor

from paceline.worker.batch import Batch
from paceline.worker.spec.spec_info import CaptureHiddenMode


@dataclass(frozen=True, slots=True)
class HiddenCapture:
    """Of which tokens (`mode`), and what: the states at `taps`, or the final norm's output."""

    mode: CaptureHiddenMode
    taps: tuple[int, ...] = ()  # ascending; empty: the final norm's output


NO_CAPTURE = HiddenCapture(CaptureHiddenMode.NULL)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    logits: Tensor | None  # [num_logits, vocab_size] fp32 on rank 0; None elsewhere
    hidden: Tensor | None = None  # [num captured, width], on every rank; None: nothing was asked


class TapBuffer:
    """Takes states as a forward passes its taps; they lie side by side in layer order."""

    def __init__(self, capture: HiddenCapture, batch: Batch, state: Tensor) -> None:
        """state: any state of the forward, for its shape."""
        taps = capture.taps
        self._rows = batch.logit_indices if capture.mode is CaptureHiddenMode.LAST else None
        num_rows = state.shape[0] if self._rows is None else self._rows.shape[0]
        self._data = state.new_empty(num_rows, len(taps), state.shape[1])
        self._columns = {tap: i for i, tap in enumerate(taps)}

    def has(self, tap: int) -> bool:
        return tap in self._columns

    def take(self, tap: int, state: Tensor) -> None:
        """Copies, since kernels go on to write where the state lies. state [num_tokens, hidden]."""
        column = self._columns.get(tap)
        if column is not None:
            rows = self._rows
            self._data[:, column] = state if rows is None else state.index_select(0, rows)

    def take_chosen(self, tap: int, state: Tensor) -> None:
        """As `take`, of a state that holds the captured rows alone."""
        column = self._columns.get(tap)
        if column is not None:
            self._data[:, column] = state

    def hidden(self) -> Tensor:
        """[num captured, len(taps) * hidden]."""
        return self._data.flatten(1)
