"""The draft that a target's own ranks compute: its model, its KV, what it reads of the target.

Its KV lies in a pool of its own with as many pages as the target's, under the same slots: one
`req_to_token`, one owner of pages. Does not know how trees are grown.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer, KvShape
from paceline.worker.config import ModelConfig, SpecConfig
from paceline.worker.errors import ConfigError
from paceline.worker.models.draft_head import DraftHead, build_head
from paceline.worker.models.eagle_config import EagleConfig, load_eagle_config
from paceline.worker.models.hidden import NO_CAPTURE, ForwardOutput, HiddenCapture
from paceline.worker.models.llama import LlamaModel
from paceline.worker.models.registry import load_model_class, load_model_config
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.spec.vocab import vocab_hash

DraftKind = Literal["eagle", "eagle3", "standalone"]


@dataclass(frozen=True, slots=True)
class ColocatedDraft:
    """One rank's part of a draft.

    `token_shift` is how far its ids lie ahead of its slots: 1 for a head, whose slot i holds what
    comes of hidden state i and token i + 1; 0 for a model of its own, whose slot i holds token i.
    `capture` is what it reads of every token that the target computes.
    """

    kind: DraftKind
    model: DraftHead
    kv: KvBuffer
    capture: HiddenCapture
    token_shift: int


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft that has its weights and not yet its KV."""

    kind: DraftKind
    model: DraftHead
    kv_shape: KvShape
    capture: HiddenCapture
    token_shift: int

    def with_kv(self, num_pages: int, page_size: int, device: str) -> ColocatedDraft:
        kv = KvBuffer(self.kv_shape, num_pages, page_size, device)
        return ColocatedDraft(self.kind, self.model, kv, self.capture, self.token_shift)


class StandaloneHead(DraftHead):
    """A whole model in the place of a head: it reads tokens alone, hidden states are void."""

    hot_token_id = None

    def __init__(self, model: LlamaModel) -> None:
        self._model = model
        self.num_layers = model.num_layers
        self.heads = model.heads
        self.vocab_size = model.head.vocab_size

    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        kv: KvBuffer,
        mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> ForwardOutput:
        """hidden: [num_tokens, 0]; so are the rows handed back."""
        out = self._model.forward(batch, kv)
        if mode is CaptureHiddenMode.NULL:
            return out
        chosen = batch.logit_indices if mode is CaptureHiddenMode.LAST else None
        num_rows = batch.num_tokens if chosen is None else len(chosen)
        return ForwardOutput(out.logits, hidden.new_empty(num_rows, 0))


def read_draft_config(spec: SpecConfig, target: ModelConfig) -> EagleConfig | ModelConfig | None:
    """What the checkpoint of a colocated draft says of itself; None where there is no such draft.

    Raises: NotFound, ConfigError: not a draft of that method, or not one for this target.
    """
    if not spec.is_colocated:
        return None
    path = spec.draft_model
    if not path:
        raise ConfigError(
            f"method '{spec.method}' needs a draft_model: the directory of the draft's checkpoint"
        )
    if spec.method == "standalone":
        return _standalone_config(path, target)
    config = load_eagle_config(path, target)
    if config.kind != spec.method:
        raise ConfigError(
            f"method is '{spec.method}', but '{path}' holds a head of kind '{config.kind}'; "
            f"use method '{config.kind}'"
        )
    return config


def load_draft_model(
    config: EagleConfig | ModelConfig,
    target: LlamaModel,
    collective: Collective,
    kernels: KernelSet,
    num_positions: int,
    *,
    token_map: str = "",
) -> DraftModel:
    """Reads this rank's shard onto its target's device.

    Raises: ConfigError: tensors that do not fit, more ranks than heads, a bad token map.
    """
    if isinstance(config, EagleConfig):
        head = build_head(config, target, collective, kernels, num_positions, token_map=token_map)
        model = config.model
        capture = config.capture(CaptureHiddenMode.FULL)
        return DraftModel(config.kind, head, _kv_shape(head, model), capture, token_shift=1)
    dtype: torch.dtype = getattr(torch, config.dtype)
    with WeightReader(config.path, dtype, str(target.embed.weight.device)) as reader:
        whole = load_model_class(config.architecture)(
            config, reader, collective, kernels, num_positions
        )
    standalone = StandaloneHead(whole)
    return DraftModel(
        "standalone", standalone, _kv_shape(standalone, config), NO_CAPTURE, token_shift=0
    )


def _standalone_config(path: str, target: ModelConfig) -> ModelConfig:
    config = replace(
        load_model_config(path, dtype=target.dtype), max_model_len=target.max_model_len
    )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft in '{path}' has a vocabulary of {config.vocab_size} tokens, its target in "
            f"'{target.path}' has {target.vocab_size}; use a draft with its target's tokenizer"
        )
    if (Path(path) / "tokenizer.json").is_file() and vocab_hash(path) != vocab_hash(target.path):
        raise ConfigError(
            f"the tokenizer in '{path}' is not that of its target in '{target.path}'; "
            "use a draft with its target's tokenizer"
        )
    return config


def _kv_shape(head: DraftHead, model: ModelConfig) -> KvShape:
    dtype: torch.dtype = getattr(torch, model.dtype)
    return KvShape(head.num_layers, len(head.heads.kvs), model.head_dim, dtype)
