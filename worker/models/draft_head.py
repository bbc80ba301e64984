"""Draft heads: the contract of every kind, and how one is built beside its target."""

import importlib
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer
from paceline.worker.errors import ConfigError
from paceline.worker.layers.embedding import LmHead, VocabEmbedding, vocab_spans
from paceline.worker.models.eagle_config import EagleConfig
from paceline.worker.models.eagle_weights import open_head, split_fused
from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.models.hot_tokens import hot_tokens_from_offsets, load_token_map
from paceline.worker.models.llama import LlamaModel
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.shards import HeadShard, Span
from paceline.worker.spec.spec_info import CaptureHiddenMode

log = logging.getLogger(__name__)

_HEADS = {
    "eagle": "paceline.worker.models.eagle:EagleHead",
    "eagle3": "paceline.worker.models.eagle3:Eagle3Head",
}


class DraftHead(ABC):
    """A few layers that guess from a target's hidden states.

    At position i it reads the hidden state of token i and the id of token i + 1, and guesses
    token i + 2.
    """

    num_layers: int
    heads: HeadShard  # of its own KV
    vocab_size: int  # width of its logits
    hot_token_id: Tensor | None  # [vocab_size] int64: the target's id of each; None: the same ids

    @abstractmethod
    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        kv: KvBuffer,
        mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> ForwardOutput:
        """Stores the batch's KV in `kv`, the head's own buffer.

        Args:
            batch: input_ids one token ahead of positions.
            hidden: [num_tokens, width], what the target handed over, or the head itself.
            mode: of which tokens its own hidden states are handed back, to be fed in again.
        """


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What a head computes with: its tensors, and what it shares with its target."""

    config: EagleConfig
    reader: WeightReader
    embed: VocabEmbedding
    head: LmHead
    hot_token_id: Tensor | None
    collective: Collective
    kernels: KernelSet
    num_positions: int  # rows of the rotary table


@torch.inference_mode()
def build_head(
    config: EagleConfig,
    target: LlamaModel,
    collective: Collective,
    kernels: KernelSet,
    num_positions: int,
    *,
    token_map: str = "",
) -> DraftHead:
    """Reads this rank's shard of a head, onto its target's device.

    Args:
        token_map: file of the target ids that an EAGLE-1 or -2 head may guess; "" for all. An
            EAGLE-3 head brings its own.
    Raises: ConfigError: tensors that do not fit, more ranks than heads, a bad token map.
    """
    model = config.model
    tensors = split_fused(open_head(Path(model.path)), model)
    dtype: torch.dtype = getattr(torch, model.dtype)
    device = str(target.embed.weight.device)
    with WeightReader(model.path, dtype, device, tensors=tensors) as reader:
        embed = target.embed
        if config.has_own_embedding:
            embed = VocabEmbedding(
                reader, "embed_tokens.weight", model.vocab_size, model.hidden_size, collective
            )
        hot_token_id = _hot_token_id(config, tensors.get("d2t"), token_map)
        if hot_token_id is not None:
            hot_token_id = hot_token_id.to(device)
        if config.has_own_head:
            head = LmHead.load(
                reader, "lm_head.weight", config.draft_vocab_size, model.hidden_size, collective
            )
        elif hot_token_id is not None:
            head = _hot_rows(config, hot_token_id, collective)
        elif config.kind == "eagle3" and model.tie_word_embeddings:
            head = LmHead(embed.weight, model.vocab_size, collective)
        else:
            head = target.head
        module, _, name = _HEADS[config.kind].partition(":")
        built: DraftHead = getattr(importlib.import_module(module), name)(
            HeadParts(config, reader, embed, head, hot_token_id, collective, kernels, num_positions)
        )
        return built


def _hot_token_id(config: EagleConfig, d2t: Tensor | None, token_map: str) -> Tensor | None:
    vocab_size = config.target.vocab_size
    if config.kind == "eagle":
        return load_token_map(token_map, vocab_size) if token_map else None
    if token_map:
        log.warning("ignored token map path=%s: an EAGLE-3 head brings its own", token_map)
    if d2t is None or not config.has_own_head:
        return None
    if tuple(d2t.shape) != (config.draft_vocab_size,):
        raise ConfigError(
            f"d2t of the head in '{config.model.path}' has shape {list(d2t.shape)}, but its "
            f"draft_vocab_size is {config.draft_vocab_size}"
        )
    return hot_tokens_from_offsets(d2t, vocab_size, config.model.path)


def _hot_rows(config: EagleConfig, hot_token_id: Tensor, collective: Collective) -> LmHead:
    """The target's head over hot tokens alone; the ranks share these evenly."""
    target = config.target
    name = "model.embed_tokens.weight" if target.tie_word_embeddings else "lm_head.weight"
    num_hot = int(hot_token_id.shape[0])
    if num_hot < collective.tp_size:
        raise ConfigError(
            f"the token map has {num_hot} tokens for a tp_size of {collective.tp_size}; "
            "each rank needs one at least"
        )
    span = vocab_spans(num_hot, collective.tp_size)[collective.tp_rank]
    mine = hot_token_id[span.start : span.stop]
    device = str(hot_token_id.device)
    with WeightReader(target.path, getattr(torch, target.dtype), device) as reader:
        rows = Span(int(mine[0]), int(mine[-1]) + 1)
        shape = (target.vocab_size, target.hidden_size)
        weight = reader.read(name, shape, rows=rows).index_select(0, mine - rows.start)
    return LmHead(weight, num_hot, collective)
