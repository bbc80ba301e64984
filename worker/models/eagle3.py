"""EAGLE-3 heads of Llama: one layer that attends over embeddings beside features of the target.

The features are several of the target's states, mixed by fc; then the head's own sum in front of
its final norm.
"""

import torch
from torch import Tensor

from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer
from paceline.worker.layers.linear import Linear
from paceline.worker.layers.norm_rotary import RmsNorm, make_cos_sin
from paceline.worker.models.draft_head import DraftHead, HeadParts
from paceline.worker.models.hidden import ForwardOutput
from paceline.worker.models.llama import LayerShards, LlamaLayer
from paceline.worker.spec.spec_info import CaptureHiddenMode


class Eagle3Head(DraftHead):
    num_layers = 1

    def __init__(self, parts: HeadParts) -> None:
        config, model, reader = parts.config, parts.config.model, parts.reader
        hidden, feature_size = model.hidden_size, config.feature_size
        shards = LayerShards.of(model, parts.collective)
        self.heads = shards.heads
        self.hot_token_id = parts.hot_token_id
        self._embed = parts.embed
        self._head = parts.head
        self.vocab_size = parts.head.vocab_size
        self._hidden_size = hidden

        def read_norm(name: str, width: int = hidden) -> RmsNorm:
            return RmsNorm(reader, f"{name}.weight", width, model.rms_norm_eps, parts.kernels)

        self._fc_norm = read_norm("input_norm", feature_size) if config.norm_before_fc else None
        self._fc = None
        if config.has_fc:
            self._fc = Linear(
                reader.read("fc.weight", (hidden, feature_size)),
                reader.read("fc.bias", (hidden,)) if "fc.bias" in reader else None,
            )
        self._embed_norm = read_norm("layers.0.input_layernorm")
        self._hidden_norm = read_norm("layers.0.hidden_norm")
        self._norm_before_residual = config.norm_before_residual
        self._layer = LlamaLayer(
            model, reader, "layers.0", shards, parts.collective, parts.kernels,
            attention_size=2 * hidden,
        )  # fmt: skip
        self._norm = read_norm("norm")
        self._cos_sin = make_cos_sin(model, parts.num_positions, reader.device)

    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        kv: KvBuffer,
        mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> ForwardOutput:
        layer = self._layer
        cos_sin = self._cos_sin.index_select(0, batch.positions)
        residual = self._mix(hidden)
        normed = self._hidden_norm(residual)
        if self._norm_before_residual:
            residual = normed
        x = torch.cat([self._embed_norm(self._embed(batch.input_ids)), normed], dim=-1)
        x = layer.attention(x, cos_sin, batch, kv.k[0], kv.v[0])
        x, residual = layer.post_norm.add(x, residual)
        x = layer.mlp(x)
        chosen = batch.logit_indices
        if chosen is not None and mode is not CaptureHiddenMode.FULL:
            x = x.index_select(0, chosen)
            residual = residual.index_select(0, chosen)
        x, features = self._norm.add(x, residual)
        if chosen is not None and mode is CaptureHiddenMode.FULL:
            x = x.index_select(0, chosen)
        logits = self._head(x)
        return ForwardOutput(logits, None if mode is CaptureHiddenMode.NULL else features)

    def _mix(self, hidden: Tensor) -> Tensor:
        """Features of the target or of the head itself -> [num_tokens, hidden_size], to keep."""
        if hidden.shape[-1] == self._hidden_size:
            return hidden.clone()  # kernels add to it in place
        assert self._fc is not None, hidden.shape
        if self._fc_norm is not None:
            hidden = self._fc_norm(hidden)
        return self._fc(hidden)
