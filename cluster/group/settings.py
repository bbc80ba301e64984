"""RankSettings: what one rank of a group is told, and what it makes of it on its node."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.worker.config import (
    CacheConfig,
    KernelSetName,
    ParallelConfig,
    SchedulerConfig,
    SpecConfig,
    WorkerConfig,
)

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as a person named it: every node finds its own copy."""

    name: str  # a built-in name or an absolute path
    dtype: str = "auto"
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """One rank's share; equal for all ranks of a group but for `tp_rank`."""

    group_id: str
    tp_rank: int
    tp_size: int
    model: ModelRef
    cache: CacheConfig
    scheduler: SchedulerConfig
    spec: SpecConfig
    draft: ModelRef | None = None  # of a colocated draft
    fallback: Literal["none", "ngram"] = "none"
    kernels: KernelSetName = "auto"
    device: str = "cpu"
    num_threads: int = 0
    deterministic: bool = False
    cuda_graphs: bool = True
    host: str = ""  # that its listeners bind to; empty is the node's address as Ray knows it
    namespace: str = ""  # of the controller's name
    timeout_s: float = 60.0  # of one collective


def worker_config(
    settings: RankSettings,
    rendezvous: str,
    progress: Progress | None = None,
) -> WorkerConfig:
    """Resolves the model on this node.

    Raises: ConfigError, NotFound, Unavailable: the model cannot be had or served.
    """
    from paceline.worker.models.registry import load_model_config

    spec = settings.spec
    if settings.draft is not None and spec.is_colocated:
        spec = replace(spec, draft_model=str(find_model(settings.draft, progress)))
    if spec.is_simulated:
        log.warning(
            "acceptance is simulated, so answers are not the model's accept_length=%g",
            spec.simulated_accept_length,
        )
    model = load_model_config(
        find_model(settings.model, progress),
        max_model_len=settings.model.max_model_len,
        dtype=settings.model.dtype,
    )
    if settings.tp_size == 1:
        backend: Literal["local", "gloo", "nccl"] = "local"
    else:
        backend = "nccl" if settings.device.startswith("cuda") else "gloo"
    return WorkerConfig(
        model=model,
        cache=settings.cache,
        scheduler=settings.scheduler,
        spec=spec,
        parallel=ParallelConfig(
            tp_size=settings.tp_size,
            tp_rank=settings.tp_rank,
            backend=backend,
            rendezvous=rendezvous,
            timeout_s=settings.timeout_s,
        ),
        kernels=settings.kernels,
        device=settings.device,
        num_threads=settings.num_threads,
        deterministic=settings.deterministic,
        cuda_graphs=settings.cuda_graphs,
    )


def find_model(ref: ModelRef, progress: Progress | None = None) -> Path:
    """The model's directory on this node; a built-in model is made now if it is not there.

    Raises: Unavailable: its weights could not be fetched.
    """
    # Not resolve_model: a path was checked at start.
    from paceline.cluster.models import BUILT_IN, get_model

    return get_model(ref.name, progress) if ref.name in BUILT_IN else Path(ref.name)
