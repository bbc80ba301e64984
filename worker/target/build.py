"""build_executor: a rank's config → its place in the group, its weights, its buffers."""

import logging
import socket
from collections.abc import Callable

import torch

from paceline.kernels.api import KernelSet
from paceline.kernels.registry import load_kernels
from paceline.worker.cache.kv_buffer import KvBuffer, KvShape, choose_num_pages
from paceline.worker.cache.req_to_token import ReqToToken, row_width
from paceline.worker.config import ModelConfig, WorkerConfig
from paceline.worker.errors import ConfigError
from paceline.worker.huge_pages import use_huge_pages
from paceline.worker.layers.row_tiles import RowTiles
from paceline.worker.models.eagle_config import EagleConfig
from paceline.worker.models.llama import LayerShards
from paceline.worker.models.registry import load_model_class
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.rendezvous import connect
from paceline.worker.parallel.shards import split_heads
from paceline.worker.runner import Runner
from paceline.worker.spec.colocated_draft import (
    ColocatedDraft,
    load_draft_model,
    read_draft_config,
)
from paceline.worker.target.executor import Executor
from paceline.worker.target.self_check import check_rows

log = logging.getLogger(__name__)


def build_executor(
    config: WorkerConfig,
    progress: Callable[[str, float], None] | None = None,
    *,
    listener: socket.socket | None = None,
) -> Executor:
    """Meets the other ranks, reads this rank's shard, and sizes the pool with them.

    Args:
        progress: told a stage ("connect", "weights", "cache") and the fraction of it done.
        listener: rank 0's socket of `reserve_rendezvous`, if it has one.
    Raises:
        ConfigError: a checkpoint, tp_size, device, kernel set or pool that cannot be.
        Unavailable: the other ranks did not come, or one was lost.
    """
    tell = progress or (lambda stage, fraction: None)
    if config.scheduler.max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs is {config.scheduler.max_num_seqs}, must be at least 1")
    # What cannot be must be found before the ranks wait for each other.
    split_heads(config.model.num_heads, config.model.num_kv_heads, config.parallel.tp_size)
    draft_config = read_draft_config(config.spec, config.model)
    if config.num_threads > 0:
        torch.set_num_threads(config.num_threads)
    kernels = _load_kernels(config)
    tell("connect", 0.0)
    collective = connect(
        config.parallel, config.device, listener, sums_in_rank_order=config.deterministic
    )
    tell("connect", 1.0)
    try:
        runner, draft = _build_runner(config, draft_config, collective, kernels, tell)
    except BaseException:
        collective.shutdown()
        raise
    return Executor(config, runner, collective, draft=draft)


@torch.inference_mode()
def _build_runner(
    config: WorkerConfig,
    draft_config: EagleConfig | ModelConfig | None,
    collective: Collective,
    kernels: KernelSet,
    tell: Callable[[str, float], None],
) -> tuple[Runner, ColocatedDraft | None]:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    width = row_width(config)
    if config.deterministic:
        _check_rows(config.model, collective, kernels)
    tell("weights", 0.0)
    tiles = RowTiles() if config.deterministic else None
    with WeightReader(config.model.path, dtype, config.device, tiles=tiles) as reader:
        model = load_model_class(config.model.architecture)(
            config.model, reader, collective, kernels, width, lambda done: tell("weights", done)
        )
    log.info(
        "loaded model path=%s dtype=%s layers=%d tp_rank=%d query_heads=%d kv_heads=%d kernels=%s",
        config.model.path, config.model.dtype, model.num_layers, collective.tp_rank,
        len(model.heads.queries), len(model.heads.kvs), kernels.name,
    )  # fmt: skip
    draft_model = None
    if draft_config is not None:
        draft_model = load_draft_model(
            draft_config, model, collective, kernels, width, token_map=config.spec.token_map
        )
        log.info(
            "loaded draft kind=%s path=%s layers=%d tp_rank=%d",
            draft_model.kind, config.spec.draft_model, draft_model.kv_shape.num_layers,
            collective.tp_rank,
        )  # fmt: skip
    if torch.device(config.device).type == "cpu":
        use_huge_pages(config.model.path)
    tell("cache", 0.0)
    shape = KvShape(model.num_layers, len(model.heads.kvs), config.model.head_dim, dtype)
    draft_shape = draft_model.kv_shape if draft_model is not None else None
    num_pages = choose_num_pages(config, shape, collective, draft_shape)
    page_size = config.cache.page_size
    kv = KvBuffer(shape, num_pages, page_size, config.device)
    draft = draft_model.with_kv(num_pages, page_size, config.device) if draft_model else None
    req_to_token = ReqToToken(config.scheduler.max_num_seqs + 1, width, page_size, config.device)
    tell("cache", 1.0)
    return Runner(model, kv, req_to_token, kernels), draft


def _check_rows(model: ModelConfig, collective: Collective, kernels: KernelSet) -> None:
    shards = LayerShards.of(model, collective)
    check_rows(kernels, model, len(shards.heads.queries), len(shards.heads.kvs), len(shards.mlp))


def _load_kernels(config: WorkerConfig) -> KernelSet:
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is '{config.device}', but torch finds no GPU; use 'cpu'")
    try:
        return load_kernels(config.kernels, config.device, deterministic=config.deterministic)
    except ValueError as error:
        raise ConfigError(str(error)) from error
