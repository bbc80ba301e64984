"""Process entry of one rank without Ray: environment → config → follow, or serve a draft.

    PACELINE_WORKER_CONFIG      WorkerConfig as JSON (`encode_config`)
    PACELINE_WORKER_GROUP       the group's id; part of every log line
    PACELINE_WORKER_LISTEN      "host:port" of a draft leader's gRPC, port 0 for any
    PACELINE_WORKER_LOG_LEVEL   debug | info | warning | error

A rank above 0 follows its leader, whatever the group serves. Rank 0 leads a draft group; the
leader of a target group holds a step loop, which is the cluster's (cluster/group/leader.py).
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping

import msgspec

from paceline.worker.config import WorkerConfig
from paceline.worker.errors import ConfigError, PacelineError, Unavailable
from paceline.worker.spec.limits import check_spec_config
from paceline.worker.telemetry import configure_logging

log = logging.getLogger(__name__)

# What a rank's process wants in its environment before it loads torch. libgomp's default spins for
# milliseconds at a barrier whose other thread has lost its core: with 2 threads on 2 busy cores
# the projections of one step took 380 to 430 ms, with this 18 to 52; 12 both ways on idle cores.
RANK_ENV = {"GOMP_SPINCOUNT": "10000"}

_CONFIG = "PACELINE_WORKER_CONFIG"
_GROUP = "PACELINE_WORKER_GROUP"
_LISTEN = "PACELINE_WORKER_LISTEN"
_LOG_LEVEL = "PACELINE_WORKER_LOG_LEVEL"


def encode_config(config: WorkerConfig) -> str:
    """What `PACELINE_WORKER_CONFIG` holds."""
    return msgspec.json.encode(config).decode()


def decode_config(text: str) -> WorkerConfig:
    """Raises: ConfigError: not a worker's config, with the field that is wrong."""
    try:
        config = msgspec.json.decode(text, type=WorkerConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{_CONFIG} is not a worker's config: {error}") from error
    check_spec_config(config.spec)
    return config


def config_from_env(env: Mapping[str, str]) -> WorkerConfig:
    """Raises: ConfigError: it is absent, or wrong."""
    if not env.get(_CONFIG):
        raise ConfigError(f"{_CONFIG} is not set; it holds the rank's config as JSON")
    return decode_config(env[_CONFIG])


def run_follower(config: WorkerConfig) -> None:
    """The whole life of a rank above 0: builds its shard and follows until the leader ends it.

    Raises: as `build_executor`; Unavailable: the leader was lost.
    """
    from paceline.worker.target.build import build_executor

    build_executor(config).follow()


async def run_draft_leader(config: WorkerConfig, group_id: str, address: str) -> None:
    """Serves a draft group until SIGTERM or SIGINT.

    Raises: as `build_proposer`; Unavailable: the port cannot be had, or the device was lost.
    """
    from paceline.worker.draft.proposer import build_proposer
    from paceline.worker.draft.server import DraftServer
    from paceline.worker.spec.vocab import vocab_hash

    host, port = _parse_listen(address)
    proposer = await asyncio.to_thread(build_proposer, config)
    server = DraftServer(
        proposer,
        vocab_hash=vocab_hash(config.model.path),
        vocab_size=config.model.vocab_size,
        group_id=group_id,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    await server.start(host, port)
    waits = [asyncio.create_task(stop.wait()), asyncio.create_task(server.wait_for_failure())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        await server.stop()
    if not stop.is_set():
        raise Unavailable(f"draft group '{group_id}' lost its device")


def main(env: Mapping[str, str] | None = None) -> int:
    """The exit status: 0 after an orderly end, 1 after a failure that was logged."""
    for name, value in RANK_ENV.items():
        os.environ.setdefault(name, value)
    env = os.environ if env is None else env
    group_id = env.get(_GROUP, "draft")
    configure_logging(group_id, env.get(_LOG_LEVEL, "info"))
    try:
        config = config_from_env(env)
        if config.parallel.tp_rank > 0:
            run_follower(config)
        else:
            asyncio.run(run_draft_leader(config, group_id, env.get(_LISTEN, "")))
    except PacelineError as error:
        log.error("rank ended error=%s: %s", type(error).__name__, error)
        return 1
    except Exception:
        log.exception("rank ended")
        return 1
    return 0


def _parse_listen(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{_LISTEN} is '{address}', must be 'host:port', port 0 for any")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main())
