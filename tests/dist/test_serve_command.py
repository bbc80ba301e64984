"""`paceline serve` as a process: how it ends on each signal, and that nothing of it stays."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

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
        await asyncio.to_thread(wait_for, lambda: "draining" in server.text())
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
