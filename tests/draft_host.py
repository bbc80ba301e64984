"""A draft server for tests: in a thread of this process, or as a process of its own to be killed.

Run as a script it serves the model directory of its first argument and prints its port.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.worker.config import CacheConfig, SchedulerConfig, SpecConfig, WorkerConfig
from paceline.worker.draft.proposer import Proposer, build_proposer
from paceline.worker.draft.server import DraftServer
from paceline.worker.models.registry import load_model_config
from paceline.worker.spec.vocab import vocab_hash

SPEC = SpecConfig(method="standalone", draft_timeout_s=5.0)


def draft_config(
    model: Path,
    spec: SpecConfig = SPEC,
    *,
    num_pages: int = 64,
    max_model_len: int = 128,
    skip_layers: Sequence[int] = (),
) -> WorkerConfig:
    return WorkerConfig(
        model=load_model_config(
            model, max_model_len=max_model_len, dtype="float32", skip_layers=skip_layers
        ),
        cache=CacheConfig(page_size=4, num_pages=num_pages),
        scheduler=SchedulerConfig(max_num_seqs=8),
        spec=spec,
        kernels="reference",
    )


def make_server(model: Path, proposer: Proposer, vocab_size: int) -> DraftServer:
    return DraftServer(
        proposer, vocab_hash=vocab_hash(model), vocab_size=vocab_size, group_id="draft-0"
    )


class DraftHost:
    """A server on an event loop in a thread of its own."""

    def __init__(self, model: Path, proposer: Proposer, vocab_size: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="draft-host")
        self._thread.start()
        self.proposer = proposer
        self.server = make_server(model, proposer, vocab_size)
        self.port: int = self.call(self.server.start("127.0.0.1", 0))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, coroutine):  # type: ignore[no-untyped-def]  # whatever the coroutine returns
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)

    def stop(self) -> None:
        self.call(self.server.stop(0.2))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()
        self._loop.close()


@contextmanager
def draft_host(model: Path, spec: SpecConfig = SPEC, *, num_pages: int = 64) -> Iterator[DraftHost]:
    with draft_host_of(draft_config(model, spec, num_pages=num_pages)) as host:
        yield host


@contextmanager
def draft_host_of(config: WorkerConfig) -> Iterator[DraftHost]:
    host = DraftHost(Path(config.model.path), build_proposer(config), config.model.vocab_size)
    try:
        yield host
    finally:
        host.stop()


async def _serve(model: Path, port: int) -> None:
    config = draft_config(model)
    server = make_server(model, build_proposer(config), config.model.vocab_size)
    print(await server.start("127.0.0.1", port), flush=True)  # noqa: T201 - the parent reads it
    await server.wait_for_failure()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
