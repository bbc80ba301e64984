"""How the ranks of a group meet: a store at rank 0's address, then a process group.

Every rank binds to the address by which it reaches rank 0, so a machine's other interfaces, its
host name and its DNS do not matter; with a loopback rendezvous no network is needed at all.
"""

import logging
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline.worker.config import ParallelConfig
from paceline.worker.errors import ConfigError, Unavailable
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.local import LocalCollective
from paceline.worker.parallel.shared_memory import join_shared_memory
from paceline.worker.parallel.torch_collective import Backend, TorchCollective, describe

log = logging.getLogger(__name__)


def reserve_rendezvous(host: str) -> tuple[socket.socket, str]:
    """A listening socket on a free port of `host`, and its "host:port" for the config of all ranks.

    Rank 0 passes the socket to `connect`, so no one can take the port in between.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(128)
    return listener, f"{host}:{listener.getsockname()[1]}"


def connect(
    config: ParallelConfig,
    device: str = "cpu",
    listener: socket.socket | None = None,
    *,
    use_shared_memory: bool = True,
    sums_in_rank_order: bool = False,
) -> Collective:
    """The collective of this rank's group; returns when all ranks have come.

    Args:
        listener: rank 0's socket of `reserve_rendezvous`; None lets rank 0 bind the port itself.
        use_shared_memory: where all ranks are CPUs of one machine; the same on every rank.
        sums_in_rank_order: as `TorchCollective` says; the same on every rank.
    Raises:
        ConfigError: a rank, size, backend or address that cannot be.
        Unavailable: the others did not come within the timeout.
    """
    if not 0 <= config.tp_rank < config.tp_size:
        raise ConfigError(f"tp_rank is {config.tp_rank}, must be in 0..{config.tp_size - 1}")
    if config.tp_size == 1:
        return LocalCollective()
    if config.backend == "local":
        raise ConfigError(
            f"tp_size is {config.tp_size}, but backend 'local' has one rank; use 'gloo' or 'nccl'"
        )
    host, port = _parse_address(config.rendezvous)
    where = f"tp_rank {config.tp_rank} of {config.tp_size}"
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store = TCPStore(
            host,
            port,
            config.tp_size,
            is_master=config.tp_rank == 0,
            timeout=timeout,
            # The store takes the descriptor over and closes it.
            master_listen_fd=listener.detach() if listener and config.tp_rank == 0 else None,
        )
        # A prefix keeps the group's keys apart from the store's own.
        prefixed = PrefixStore("paceline", store)
        memory = None
        if use_shared_memory and torch.device(device).type == "cpu":
            memory = join_shared_memory(prefixed, config.tp_rank, config.tp_size, config.timeout_s)
        group = _make_group(config, prefixed, _own_address(host, port, config.tp_rank), timeout)
    except (RuntimeError, OSError) as error:
        raise Unavailable(
            f"{where}: rendezvous at {config.rendezvous} failed or outlasted "
            f"{config.timeout_s:g} s: {describe(error)}; are all {config.tp_size} ranks running, "
            "and can they reach that address?"
        ) from error
    log.info(
        "joined group tp_rank=%d tp_size=%d backend=%s shared_memory=%s rendezvous=%s",
        config.tp_rank, config.tp_size, config.backend, memory is not None, config.rendezvous,
    )  # fmt: skip
    return TorchCollective(
        group, store, device, config.timeout_s, memory, sums_in_rank_order=sums_in_rank_order
    )


def _make_group(config: ParallelConfig, store: Store, address: str, timeout: timedelta) -> Backend:
    if config.backend == "nccl":
        if not dist.is_nccl_available():
            raise ConfigError("backend is 'nccl', but this torch has none; use 'gloo'")
        nccl: Any = dist.ProcessGroupNCCL  # Any: a torch without CUDA has none
        nccl_options = nccl.Options()
        nccl_options._timeout = timeout
        return nccl(store, config.tp_rank, config.tp_size, nccl_options)
    gloo: Any = dist.ProcessGroupGloo  # Any: torch's stubs lack this constructor
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, config.tp_rank, config.tp_size, options)


def _own_address(host: str, port: int, tp_rank: int) -> str:
    """The address of the interface that leads to rank 0; rank 0's is the one it was given."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    if tp_rank == 0:
        return str(target[0])
    # Connecting a datagram socket sends nothing; it only asks the routing table.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _parse_address(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"rendezvous is '{rendezvous}', must be 'host:port' of rank 0")
    return host, int(port)
