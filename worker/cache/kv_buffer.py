"""The K and V storage of one rank, and how many pages it gets.

Does not know who owns a page; page 0 is a dump that no req owns.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.config import WorkerConfig
from paceline.worker.errors import ConfigError
from paceline.worker.parallel.collective import Collective
from paceline.worker.spec.limits import reserve_len

log = logging.getLogger(__name__)

_CPU_DEFAULT_BYTES = 1 << 30  # of a whole group
_CPU_FRACTION = 0.5  # of free memory: others live on the machine too
_GPU_FRACTION = 0.9
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one rank stores of a token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvBuffer:
    """`k[layer]` and `v[layer]`: [(num_pages + 1) * page_size, num_kv_heads, head_dim]."""

    def __init__(self, shape: KvShape, num_pages: int, page_size: int, device: str) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        size = ((num_pages + 1) * page_size, shape.num_kv_heads, shape.head_dim)
        self.k = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]
        self.v = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]

    def move(self, kernels: KernelSet, src: Tensor, tgt: Tensor) -> None:
        """slot tgt[i] = slot src[i] in every layer. src, tgt [n] int64."""
        kernels.move_kv([*self.k, *self.v], src, tgt)


def _zeros(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros, since 0 times the garbage of an unwritten slot could be NaN.

    On a CPU numpy's, which take no memory until they are written to; torch would write them all.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(size)


def choose_num_pages(
    config: WorkerConfig, shape: KvShape, collective: Collective, draft: KvShape | None = None
) -> int:
    """Pages of the pool without page 0: the same on every rank, the least that any can hold.

    Args:
        draft: what this rank stores of a token for a colocated draft, in as many pages.
    Raises: ConfigError: one req of max_model_len would not fit.
    """
    page_size = config.cache.page_size
    if page_size < 1:
        raise ConfigError(f"cache.page_size is {page_size}, must be at least 1")
    token_bytes = shape.token_bytes + (draft.token_bytes if draft is not None else 0)
    max_model_len = config.model.max_model_len
    pages_per_req = -(-max_model_len // page_size)
    if config.cache.num_pages > 0:
        source = "cache.num_pages"
        num_pages = config.cache.num_pages
    else:
        budget_bytes, source = _budget(config)
        num_pages = max(budget_bytes // (token_bytes * page_size) - 1, 0)
        # Draft nodes reach past the longest req, so each row may need a little more than its pages.
        reserve = max(2 * config.spec.num_draft_tokens, reserve_len(config.spec, overlap=True))
        spare = -(-reserve // page_size) + 1
        num_pages = min(num_pages, config.scheduler.max_num_seqs * (pages_per_req + spare))
    num_pages = collective.all_reduce_min(num_pages)
    pool_bytes = num_pages * page_size * token_bytes
    if num_pages < pages_per_req:
        raise ConfigError(
            f"the KV pool holds {num_pages} pages of {page_size} tokens (from {source}), but one "
            f"request of {max_model_len} tokens needs {pages_per_req} "
            f"({pages_per_req * page_size * token_bytes / 2**20:.0f} MiB on this rank); "
            "lower max_model_len, raise cache.num_pages or cache.max_bytes, or free memory"
        )
    log.info(
        "sized KV pool pages=%d page_size=%d tokens=%d mib=%.0f from=%s",
        num_pages, page_size, num_pages * page_size, pool_bytes / 2**20, source,
    )  # fmt: skip
    return num_pages


def _budget(config: WorkerConfig) -> tuple[int, str]:
    if torch.device(config.device).type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(config.device)
        budget_bytes = int(free_bytes * _GPU_FRACTION)
        if config.cache.max_bytes:
            budget_bytes = min(budget_bytes, config.cache.max_bytes)
        return budget_bytes, f"{free_bytes / 2**20:.0f} MiB of free GPU memory"
    # The ranks of a CPU group may all be on this machine, so each takes its share.
    tp_size = config.parallel.tp_size
    free_bytes = free_cpu_bytes()
    limit_bytes = config.cache.max_bytes or _CPU_DEFAULT_BYTES // tp_size
    budget_bytes = min(int(free_bytes * _CPU_FRACTION) // tp_size, limit_bytes)
    return budget_bytes, (
        f"{free_bytes / 2**20:.0f} MiB of free memory, at most {limit_bytes / 2**20:.0f} MiB a rank"
    )


def free_cpu_bytes(cgroup: Path = _CGROUP) -> int:
    """What this process may still take of the machine, or of its control group if less."""
    free_bytes = int(psutil.virtual_memory().available)
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = (cgroup / limit_name).read_text().strip()
            used = int((cgroup / used_name).read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            cached = _reclaimable_bytes(cgroup / Path(limit_name).parent / "memory.stat")
            free_bytes = min(free_bytes, max(int(limit) - used + cached, 0))
    return free_bytes


def _reclaimable_bytes(stat: Path) -> int:
    """File pages the kernel drops when it needs memory; the weights just read are among them."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
