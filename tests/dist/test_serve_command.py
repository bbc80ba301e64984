"""`paceline serve` as a process: how it ends on each signal, and that nothing of it stays."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from paceline.cluster.cli import main as cli
from paceline.cluster.client import PacelineClient
from paceline.worker.errors import Unavailable
from tests.polling import wait_for

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 300


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    log: Path  # stdout and stderr
    family: list[tuple[psutil.Process, str]]  # itself and all it started, with their names

    def text(self) -> str:
        return self.log.read_text()

    def note_family(self) -> None:
        this = psutil.Process(self.process.pid)
        self.family = [(p, p.name()) for p in (this, *this.children(recursive=True))]

    def wait_gone(self, but: tuple[str, ...] = ()) -> int:
        """The exit code, once no process of the family is left, but those of some names."""
        code = self.process.wait(30)
        _, alive = psutil.wait_procs([p for p, name in self.family if name not in but], timeout=15)
        assert not alive, f"left behind: {alive}\n{self.text()}"
        return code

    @property
    def grpc_address(self) -> str:
        found = re.search(r"gRPC (\S+),", self.text())
        return found[1] if found else ""


@contextmanager
def serving(log: Path, *args: str) -> Iterator[Server]:
    """`paceline serve`, started from the repository as a terminal would: a group of its own."""
    command = [
        sys.executable, "-m", "paceline.cluster.cli.main", "serve", *args,
        "--dtype", "float32", "--port", "0", "--grpc-port", "0", "--num-pages", "200",
        "--num-cpus", "2", "--threads-per-rank", "1",
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, text=True, start_new_session=True
        )
    server = Server(process, log, [])
    try:
        yield server
    finally:
        if process.poll() is None:
            server.note_family()
        for member, _ in server.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def wait_ready(server: Server) -> None:
    wait_for(lambda: server.grpc_address or server.process.poll() is not None, 90.0)
    assert server.process.poll() is None, server.text()
    server.note_family()


async def stream(server: Server, begun: asyncio.Event) -> int:
    """How many tokens came of NUM_TOKENS."""
    num_tokens = 0
    async with PacelineClient(server.grpc_address) as client:
        async for piece in client.generate(
            input_ids=[5, 6, 7], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True
        ):
            num_tokens += len(piece.token_ids)
            begun.set()
    return num_tokens


async def test_ctrl_c_lets_running_requests_end_and_leaves_no_process(
    tiny_model: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    args = (str(tiny_model), "-tp", "2", "--draft", str(tiny_draft))
    with serving(tmp_path / "log", *args) as server:
        wait_ready(server)
        begun = asyncio.Event()
        answer = asyncio.create_task(stream(server, begun))
        await begun.wait()
        os.killpg(server.process.pid, signal.SIGINT)  # as a terminal does: to every process
        assert await answer == NUM_TOKENS
        assert await asyncio.to_thread(server.wait_gone) == 130
        text = server.text()
    assert "draining for 30 s at most" in text
    assert re.search(r"stopped: all \d+ processes are gone\n", text)
    assert "Traceback" not in text


async def test_sigterm_drains_and_a_second_one_ends_at_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        wait_ready(server)
        # Slow enough to be cut short: a batch of long answers on one thread.
        begun = [asyncio.Event() for _ in range(24)]
        answers = [asyncio.create_task(stream(server, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        server.process.send_signal(signal.SIGTERM)
        sent_s = time.monotonic()
        await asyncio.to_thread(
            wait_for,  # two at once would be one
            lambda: "draining" in server.text() and time.monotonic() - sent_s > 0.2,
        )
        server.process.send_signal(signal.SIGTERM)
        results = await asyncio.gather(*answers, return_exceptions=True)
        assert await asyncio.to_thread(server.wait_gone) == 0
    assert all(isinstance(r, Unavailable) or r == NUM_TOKENS for r in results)
    assert any(isinstance(r, Unavailable) for r in results)


def test_ctrl_c_while_starting_leaves_no_process(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        wait_for(lambda: "target-0" in server.text(), 60.0)
        server.note_family()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait_gone() == 130
        assert "Traceback" not in server.text()


def test_ctrl_c_while_ray_starts_ends_its_processes_without_waiting_for_them(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        this = psutil.Process(server.process.pid)
        wait_for(lambda: any("gcs_server" in p.name() for p in this.children()), 60.0)
        server.note_family()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.wait_gone() == 130
        text = server.text()
    assert "ray: ready" not in text
    assert "outlived" not in text
    assert "Traceback" not in text


def test_killed_server_takes_its_processes_with_it(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        wait_ready(server)
        server.process.kill()
        # Two agents of Ray's own look for their parent only now and then.
        agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
        assert server.wait_gone(but=agents) == -signal.SIGKILL


async def test_a_lost_group_is_told_of_and_its_return_too(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    with serving(tmp_path / "log", str(model)) as server:
        wait_ready(server)
        (model / "config.json").rename(tmp_path / "config.json")
        for process, name in server.family:
            if name.startswith("ray::GroupLeader"):
                process.kill()
        begun = asyncio.Event()
        waiting = asyncio.create_task(stream(server, begun))
        await asyncio.to_thread(wait_for, lambda: "(attempt 5)" in server.text(), 60.0)
        # Who waited and who comes now: neither waits for what cannot be.
        for answer in (waiting, stream(server, begun)):
            with pytest.raises(Unavailable, match=r"target-0 did not start \d+ times: .*config"):
                await asyncio.wait_for(answer, 10.0)
        command = ["status", "--address", server.grpc_address]
        assert await asyncio.to_thread(cli.run, command) == 0
        assert "target-0: last error: " in capsys.readouterr().out
        (tmp_path / "config.json").rename(model / "config.json")
        back = re.compile(r"target-0 is ready again after \d+ s\n")
        await asyncio.to_thread(wait_for, lambda: back.search(server.text()), 60.0)
        assert await asyncio.wait_for(stream(server, begun), 30.0) == NUM_TOKENS
        server.note_family()
        text = server.text()
    assert re.search(
        r"target-0 died: .*; starting it again in 0.2 s \(attempt 2\)\n"
        r"target-0 did not start: .*config.*; starting it again in 0.4 s \(attempt 3\)\n"
        r"target-0 did not start: .*config.*; starting it again in 0.8 s \(attempt 4\)\n",
        text,
    )


def test_a_lost_front_is_told_of_and_its_return_too(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        wait_ready(server)
        for process, name in server.family:
            if name.startswith("ray::FrontActor"):
                process.kill()
        wait_for(lambda: "front-0 is ready again after " in server.text(), 60.0)
        server.note_family()
        assert re.search(r"front-0 died: .*\(attempt 2\)\n", server.text())


@pytest.mark.parametrize("num_signals", [1, 2], ids=["a shell", "timeout: itself, then the group"])
async def test_sigterm_to_the_whole_group_drains(
    tiny_model: Path, tmp_path: Path, num_signals: int
) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        wait_ready(server)
        begun = asyncio.Event()
        answer = asyncio.create_task(stream(server, begun))
        await begun.wait()
        for _ in range(num_signals):
            os.killpg(server.process.pid, signal.SIGTERM)
        assert await answer == NUM_TOKENS
        assert await asyncio.to_thread(server.wait_gone) == 0
        text = server.text()
    assert re.search(r"stopped: all \d+ processes are gone\n", text)


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_server_whose_ray_was_ended_from_outside_ends_within_seconds(
    tiny_model: Path, tmp_path: Path, name: str
) -> None:
    with serving(tmp_path / "log", str(tiny_model)) as server:
        wait_ready(server)
        for process, process_name in server.family:
            if process_name == name:
                process.terminate()
        server.process.terminate()
        began_s = time.monotonic()
        assert server.wait_gone() == 1
        assert time.monotonic() - began_s < 10.0
        text = server.text()
    assert "KillMode=mixed" in text
    assert "/logs" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("-tp", "64"), 3, "group target-0: 64 ranks asked, 4 can be placed"),
        (("--placement-timeout", "0"), 3, "'ray.placement_timeout_s' is 0.0"),
        (("--draft", "auto"), 3, "no draft ships for model"),
        (("--speculative-config", "{"), 3, "--speculative-config is not JSON"),
        (("--no-such-flag",), 2, "--no-such-flag"),
    ],
    ids=["no room", "bad value", "no draft", "bad json", "bad flag"],
)
def test_start_that_cannot_be_ends_with_its_exit_code_and_reason(
    tiny_model: Path, tmp_path: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    with serving(tmp_path / "log", str(tiny_model), *args) as server:
        assert server.process.wait(60) == code
        text = server.text()
    assert words in text
    assert "Traceback" not in text
