"""`paceline demo`: everything on this machine, two questions at once, receipts, and a clean end."""

import asyncio
import json
import shlex
import sys
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

import typer

if TYPE_CHECKING:
    import psutil

    from paceline.cluster.client import PacelineClient
    from paceline.cluster.config import ClusterConfig
    from paceline.protos.v1 import generation_pb2

MODEL = "smollm2-135m"
DRAFT = "smollm2-135m-draft"
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that adds the numbers from 1 to n.",
)
_ANSWER_TIMEOUT_S = 300.0
_SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a demo showed, for those who run it from a program."""

    answers: "tuple[generation_pb2.GenerateComplete, ...]"  # one per question, over gRPC
    http_text: str  # the first question again, over HTTP
    peak_rss_bytes: int  # of all processes together
    leftover_pids: tuple[int, ...]


def demo(
    *,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 80,
) -> None:
    """Start a target on two ranks and a draft, ask two questions, show receipts, leave nothing."""
    result = run_demo(max_tokens=max_tokens)
    if result.leftover_pids:
        raise typer.Exit(1)


def demo_config() -> "ClusterConfig":
    from paceline.cluster.config import load_config

    return load_config(
        None,
        {
            "model": MODEL,
            # So that the answer does not depend on what else is in the batch; with one thread per
            # rank it costs little more than bfloat16.
            "dtype": "float32",
            "target.tensor_parallel_size": 2,
            "draft.method": "standalone",
            "draft.model": DRAFT,
            "front.port": 0,
            "front.grpc_port": 0,
            # All of it fits on one CPU, if slowly: this is a promise to placement only.
            "ray.num_cpus_per_rank": 0.25,
        },
    )


def run_demo(*, max_tokens: int = 80, questions: Sequence[str] = QUESTIONS) -> DemoResult:
    from paceline.cluster.cli.generate import describe_receipt
    from paceline.cluster.cli.progress import StartProgress
    from paceline.cluster.cli.serve import describe_stop
    from paceline.cluster.launch import start

    with _PeakMemory() as memory:
        _title("Starting Ray, a target on two ranks, a draft, the controller and a front")
        with StartProgress() as progress:
            deployment = start(demo_config(), progress.tell)
        try:
            _title(f"Two questions at once over gRPC at {deployment.grpc_address}")
            answers = asyncio.run(_ask_all(deployment.grpc_address, questions, max_tokens))
            for number, answer in enumerate(answers, 1):
                print(f"receipt [{number}]  {describe_receipt(answer.receipt)}", flush=True)
            _title("The first question again, over HTTP")
            http_text = _ask_http(deployment.http_url, questions[0], max_tokens)
            print(f"{_wrap(http_text)}\n({_compare(http_text, answers[0].text)})", flush=True)
        finally:
            _title("Shutting down")
            report = deployment.stop()
    print(describe_stop(report))
    print(f"peak memory of all processes: {memory.peak_bytes / 2**30:.2f} GiB", flush=True)
    return DemoResult(tuple(answers), http_text, memory.peak_bytes, report.leftover_pids)


# ---- over gRPC


class _Display(Protocol):
    def add(self, index: int, text: str) -> None: ...


async def _ask_all(
    address: str, questions: Sequence[str], max_tokens: int
) -> "list[generation_pb2.GenerateComplete]":
    from paceline.cluster.client import PacelineClient

    with _make_display(questions) as display:
        async with PacelineClient(address) as client, asyncio.TaskGroup() as group:
            asked = [
                group.create_task(_ask(client, question, i, display, max_tokens))
                for i, question in enumerate(questions)
            ]
    return [task.result() for task in asked]


async def _ask(
    client: "PacelineClient", question: str, index: int, display: _Display, max_tokens: int
) -> "generation_pb2.GenerateComplete":
    from paceline.worker.errors import InternalError

    async for piece in client.generate(
        messages=[{"role": "user", "content": question}],
        temperature=0.0,
        max_tokens=max_tokens,
        timeout_s=_ANSWER_TIMEOUT_S,
    ):
        display.add(index, piece.text)
        if piece.complete is not None:
            return piece.complete
    raise InternalError("the stream ended without an answer")


# ---- over HTTP


def _ask_http(url: str, question: str, max_tokens: int) -> str:
    import httpx

    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    path = f"{url}/v1/chat/completions"
    data = shlex.quote(json.dumps(body))
    print(f"curl {path} -H 'Content-Type: application/json' -d {data}\n", flush=True)
    # Not through a proxy that the environment may name: the server is this machine.
    with httpx.Client(timeout=_ANSWER_TIMEOUT_S, trust_env=False) as client:
        answer: dict[str, Any] = client.post(path, json=body).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


def _compare(http_text: str, grpc_text: str) -> str:
    if http_text == grpc_text:
        return "the same as over gRPC"
    num_same = next(
        (i for i, (a, b) in enumerate(zip(http_text, grpc_text, strict=False)) if a != b),
        min(len(http_text), len(grpc_text)),
    )
    # Not an error: sums depend on how many rows a step has, and the question now runs alone.
    return (
        f"the same as over gRPC for {num_same} characters; then two tokens were so close that "
        "another batch, whose sums are rounded otherwise, chose the other one"
    )


# ---- the terminal


def _title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _wrap(text: str) -> str:
    return "\n".join(textwrap.fill(line, 98, initial_indent="  ", subsequent_indent="  ")
                     for line in text.splitlines())  # fmt: skip


def _make_display(questions: Sequence[str]) -> "_Panels | _Lines":
    return _Panels(questions) if sys.stdout.isatty() else _Lines(questions)


class _Panels:
    """One growing panel per question."""

    def __init__(self, questions: Sequence[str]) -> None:
        from rich.live import Live

        self._questions = questions
        self._texts = [""] * len(questions)
        self._live = Live(get_renderable=self._render, refresh_per_second=12)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def add(self, index: int, text: str) -> None:
        self._texts[index] += text

    def _render(self) -> Any:  # Any: rich's renderables have no common type
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        return Group(
            *(
                Panel(Text(text), title=Text(f"[{i}] {question}"), title_align="left")
                for i, (question, text) in enumerate(
                    zip(self._questions, self._texts, strict=True), 1
                )
            )
        )


class _Lines:
    """Whole lines as they fill, each with the number of its question: for pipes and logs."""

    _WIDTH = 90

    def __init__(self, questions: Sequence[str]) -> None:
        self._rest = [""] * len(questions)
        for i, question in enumerate(questions, 1):
            print(f"[{i}] ? {question}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for index, rest in enumerate(self._rest):
            if rest:
                self._print(index, rest)

    def add(self, index: int, text: str) -> None:
        *lines, rest = (self._rest[index] + text).split("\n")
        while len(rest) > self._WIDTH and " " in rest:
            cut = rest.rfind(" ", 0, self._WIDTH) + 1 or rest.find(" ") + 1
            lines.append(rest[:cut])
            rest = rest[cut:]
        self._rest[index] = rest
        for line in lines:
            self._print(index, line)

    def _print(self, index: int, line: str) -> None:
        print(f"[{index + 1}]   {line}", flush=True)


class _PeakMemory:
    """Samples the resident memory of this process and all that descend from it."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        import psutil

        this = psutil.Process()
        while not self._has_ended.wait(_SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(this))


def resident_bytes(root: "psutil.Process") -> int:
    """Of a process and all that descend from it; pages they share count once for each of them."""
    import psutil

    total_bytes = 0
    try:
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total_bytes += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total_bytes
