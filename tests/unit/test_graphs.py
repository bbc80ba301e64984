"""Work recorded once and repeated, or run as it is where it cannot be."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from paceline.worker import graphs
from paceline.worker.graphs import CudaGraphs, padded_bs

CUDA = torch.device("cuda")


def test_batches_are_padded_to_few_sizes_and_by_less_than_their_own() -> None:
    sizes = [padded_bs(bs) for bs in range(1, 257)]
    assert all(bs <= size < 2 * bs for bs, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4 + 31
    assert [padded_bs(size) for size in sizes] == sizes


class Work:
    """Adds its inputs to a sum, and hands their double back."""

    def __init__(self) -> None:
        self.sum = torch.zeros(2, device=CUDA)
        self.num_calls = 0

    def __call__(self, inputs: Tensor) -> Tensor:
        self.num_calls += 1
        self.sum += inputs
        return inputs * 2


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, device=CUDA)


@pytest.mark.gpu
def test_a_recording_does_what_the_work_did_to_other_inputs_and_calls_it_no_more() -> None:
    recorder, work, total = CudaGraphs(CUDA), Work(), torch.zeros(2)
    for i in range(8):
        got = recorder.run("double", numbers(i, 10.0 + i), work)
        total += torch.tensor([i, 10.0 + i])
        assert got.tolist() == [2.0 * i, 20.0 + 2 * i]
        assert work.sum.tolist() == total.tolist()
    assert (recorder.num_recorded, work.num_calls) == (1, graphs._NUM_UNRECORDED + 1)


@pytest.mark.gpu
def test_the_same_inputs_again_are_not_copied_but_count() -> None:
    recorder, work, inputs = CudaGraphs(CUDA), Work(), numbers(1.0, 2.0)
    for _ in range(6):
        recorder.run("double", inputs, work)
    assert work.sum.tolist() == [6.0, 12.0]


@pytest.mark.gpu
def test_the_recording_that_rested_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MAX_GRAPHS", 2)
    recorder, works = CudaGraphs(CUDA), [Work() for _ in range(3)]
    for num_rounds in range(1, 9):
        for key, work in enumerate(works):
            assert recorder.run(key, numbers(1.0, 2.0), work).tolist() == [2.0, 4.0]
            assert work.sum.tolist() == [num_rounds, 2.0 * num_rounds]
    assert recorder.num_recorded == 2


@pytest.mark.gpu
def test_work_that_cannot_be_recorded_runs_as_it_is() -> None:
    """In a process of its own, in which torch draws no more random numbers on the device."""
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("recording failed") == 1


def record_in_vain() -> None:
    """Of work that reads a number back, which no recording can."""
    recorder, total = CudaGraphs(CUDA), torch.zeros(2, device=CUDA)

    def wait(inputs: Tensor) -> float:
        read = float(inputs.sum())
        total.add_(inputs)
        return read

    for i in range(6):
        assert recorder.run("wait", numbers(i, 1.0), wait) == i + 1.0
    assert total.tolist() == [15.0, 6.0]
    assert recorder.num_recorded == 0
    work = Work()
    for _ in range(6):
        recorder.run("double", numbers(1.0, 2.0), work)
    assert (work.sum.tolist(), work.num_calls) == ([6.0, 12.0], 6)


if __name__ == "__main__":
    logging.basicConfig()
    record_in_vain()
