"""A cache entry appears whole, once, and is seen to be damaged when it is."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cluster.models.cache import default_cache_dir, ensure_entry, is_intact
from paceline.worker.errors import ConfigError


def ignore(_what: str, _fraction: float) -> None:
    pass


class Builder:
    """Writes two files and counts how often it was asked to."""

    def __init__(self) -> None:
        self.num_builds = 0

    def __call__(self, out: Path) -> None:
        assert list(out.iterdir()) == []
        self.num_builds += 1
        (out / "weights").write_bytes(b"w" * 4096)
        (out / "config.json").write_text("{}")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "model"


def test_an_entry_is_built_once(entry: Path) -> None:
    build = Builder()
    for _ in range(3):
        assert ensure_entry(entry, 1, build, ignore) == entry
    assert build.num_builds == 1
    assert (entry / "weights").read_bytes() == b"w" * 4096


def test_a_new_recipe_builds_anew(entry: Path) -> None:
    build = Builder()
    ensure_entry(entry, 1, build, ignore)
    ensure_entry(entry, 2, build, ignore)
    assert build.num_builds == 2


def flip_a_byte(entry: Path) -> None:
    data = bytearray((entry / "weights").read_bytes())
    data[17] ^= 1
    (entry / "weights").write_bytes(data)


def truncate(entry: Path) -> None:
    os.truncate(entry / "weights", 100)


def lose_a_file(entry: Path) -> None:
    (entry / "config.json").unlink()


def lose_the_marker(entry: Path) -> None:
    (entry / ".paceline.json").unlink()


def garble_the_marker(entry: Path) -> None:
    (entry / ".paceline.json").write_text('{"recipe": 1, "files": [')


def replace_by_a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("not a directory")


@pytest.mark.parametrize(
    "damage",
    [flip_a_byte, truncate, lose_a_file, lose_the_marker, garble_the_marker, replace_by_a_file],
)
def test_a_damaged_entry_is_made_again(entry: Path, damage: Callable[[Path], None]) -> None:
    build = Builder()
    ensure_entry(entry, 1, build, ignore)
    damage(entry)
    assert not is_intact(entry, 1)
    ensure_entry(entry, 1, build, ignore)
    assert build.num_builds == 2
    assert is_intact(entry, 1)
    assert (entry / "weights").read_bytes() == b"w" * 4096


def test_a_copied_entry_is_intact_and_hashed_only_once(entry: Path) -> None:
    ensure_entry(entry, 1, Builder(), ignore)
    copy = entry.with_name("copy")
    shutil.copytree(entry, copy, copy_function=shutil.copyfile)
    assert is_intact(copy, 1)
    # The new times are noted: from now on a changed byte with an unchanged time goes unseen.
    times = (copy / "weights").stat()
    flip_a_byte(copy)
    os.utime(copy / "weights", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert is_intact(copy, 1)


def test_a_build_that_fails_leaves_nothing_and_what_was_there(entry: Path) -> None:
    ensure_entry(entry, 1, Builder(), ignore)

    def fail(out: Path) -> None:
        (out / "half").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ensure_entry(entry, 2, fail, ignore)
    assert is_intact(entry, 1)
    assert sorted(os.listdir(entry.parent)) == [".model.lock", "model"]


def test_an_open_file_survives_its_entry_being_replaced(entry: Path) -> None:
    ensure_entry(entry, 1, Builder(), ignore)
    with (entry / "weights").open("rb") as before:
        ensure_entry(entry, 2, Builder(), ignore)
        assert before.read() == b"w" * 4096


def test_what_a_killed_process_left_is_removed(entry: Path) -> None:
    leftover = entry.parent / ".model.build-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("half")
    ensure_entry(entry, 1, Builder(), ignore)
    assert not leftover.exists()


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/model.*set PACELINE_CACHE"):
        ensure_entry(tmp_path / "file" / "model", 1, Builder(), ignore)


PROCESS = """
import sys, time
from pathlib import Path
from paceline.cluster.models.cache import ensure_entry

entry, ready, go = map(Path, sys.argv[1:])

def build(out):
    with (entry.parent / "builds").open("a") as log:
        log.write("x")
    (out / "weights").write_bytes(b"w" * 4096)

ready.touch()
while not go.exists():
    time.sleep(0.001)
ensure_entry(entry, 1, build, lambda what, fraction: None)
assert (entry / "weights").read_bytes() == b"w" * 4096
"""


def test_of_several_processes_one_builds_and_all_have_it(entry: Path) -> None:
    entry.parent.mkdir()
    go = entry.parent / "go"
    ready = [entry.parent / f"ready-{i}" for i in range(4)]
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, str(entry), str(flag), str(go)])
        for flag in ready
    ]
    try:
        deadline_s = time.monotonic() + 30
        while not all(flag.exists() for flag in ready):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        go.touch()
        assert [process.wait(30) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (entry.parent / "builds").read_text() == "x"


def test_a_waiting_process_is_told_what_for(entry: Path) -> None:
    entry.parent.mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys\n"
            "handle = open(sys.argv[1], 'a')\n"
            "fcntl.flock(handle, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n",
            str(entry.parent / ".model.lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    said: list[str] = []

    def let_go(what: str, _fraction: float) -> None:
        said.append(what)
        holder.stdin.close()

    with holder:
        assert holder.stdout.readline() == b"held\n"
        ensure_entry(entry, 1, Builder(), let_go)
    assert said == ["waiting for another process that makes model"]


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/models")
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/paceline/models")
