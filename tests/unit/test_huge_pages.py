"""Which memory of a process is moved into huge pages."""

from pathlib import Path

import pytest
import torch

from paceline.worker.huge_pages import anonymous_areas, use_huge_pages

MAPS = """\
555500000000-555500800000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f1000000000-7f1000800000 r--p 00000000 00:00 0
7f2000000000-7f2000800000 rw-p 00000000 08:01 17                         /lib/libtorch_cpu.so
7f3000000000-7f3000300000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_areas_are_whole_huge_pages_of_ones_own_memory() -> None:
    assert anonymous_areas(MAPS) == [
        (0x555500000000, 0x555500800000),
        (0x7F0000200000, 0x7F0000800000),
    ]


def test_memory_keeps_what_it_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(64 << 20)  # a hole: no byte of it is on the disk
    weight = torch.arange(4 << 20, dtype=torch.int64)
    use_huge_pages(str(tmp_path))
    assert torch.equal(weight, torch.arange(4 << 20))
    assert "huge pages under" in caplog.text


def test_small_models_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    use_huge_pages(str(tmp_path))
    assert caplog.text == ""
