"""Graphs: work on a device that is recorded once and repeated as a whole.

To launch one operation costs the host about ten microseconds, and a small step has hundreds of
them; a recorded step is one launch. It repeats the very operations on the very buffers, so that
nothing of the host reaches it but through `inputs`.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")

# Runs of a key before it is recorded: kernels are compiled, and constants made, by then.
_NUM_UNRECORDED = 2
_MAX_GRAPHS = 64  # each holds on to its launches, about a megabyte


class Graphs(Protocol):
    def run(self, key: Hashable, inputs: Tensor, work: Callable[[Tensor], T]) -> T:
        """`work(inputs)`, or a repetition of what it did when it was called with an equal key.

        Args:
            inputs: on the device; always of one shape for one key.
            work: what it does to the device depends on `key` alone, and waits for nothing.
        Returns: tensors that the next run overwrites.
        """


def padded_bs(bs: int) -> int:
    """A size of batches less than twice as great, of which there are few."""
    return 1 << (bs - 1).bit_length() if bs <= 8 else -(-bs // 8) * 8


class CudaGraphs:
    """Belongs to the device thread. Where work cannot be recorded, all runs as it is from then on;
    torch's own random numbers on the device, which nothing here draws, are lost to the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()  # untyped
        self._num_runs: Counter[Hashable] = Counter()
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()  # last used last
        self._can_record = True

    @property
    def num_recorded(self) -> int:
        return len(self._recordings)

    def run(self, key: Hashable, inputs: Tensor, work: Callable[[Tensor], T]) -> T:
        recording = self._recordings.get(key)
        if recording is None:
            self._num_runs[key] += 1
            if self._can_record and self._num_runs[key] > _NUM_UNRECORDED:
                recording = self._try_to_record(key, inputs, work)
            if recording is None:
                return work(inputs)
        self._recordings.move_to_end(key)
        result: T = recording.repeat(inputs)
        return result

    def _try_to_record(
        self, key: Hashable, inputs: Tensor, work: Callable[[Tensor], T]
    ) -> "_Recording | None":
        try:
            recording = self._record(inputs.clone(), work)
        except RuntimeError as error:
            self._can_record = False
            log.warning("steps are launched one by one: recording failed error=%s", error)
            return None
        self._recordings[key] = recording
        if len(self._recordings) > _MAX_GRAPHS:
            self._recordings.popitem(last=False)
        log.debug("recorded step key=%s", key)
        return recording

    def _record(self, inputs: Tensor, work: Callable[[Tensor], T]) -> "_Recording":
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Other threads may go on with what a recording thread must not do.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work(inputs)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _Recording(graph, inputs, result)


@dataclass(slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    result: Any  # of tensors that a repetition writes to
    last: Tensor | None = None  # what `inputs` was copied from

    def repeat(self, inputs: Tensor) -> Any:
        if inputs is not self.last:
            self.inputs.copy_(inputs)
            self.last = inputs
        self.graph.replay()
        return self.result
