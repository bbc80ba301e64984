"""EAGLE-1 and -2 heads of Llama: the next token's embedding and this one's features, mixed by fc.

The features are the target's after its final norm, then the head's own output, which no norm
follows. Embedding and lm_head are the target's; the two kinds differ in how trees are grown.
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


class EagleHead(DraftHead):
    def __init__(self, parts: HeadParts) -> None:
        model, reader, kernels = parts.config.model, parts.reader, parts.kernels
        hidden = model.hidden_size
        shards = LayerShards.of(model, parts.collective)
        self.heads = shards.heads
        self.num_layers = model.num_layers
        self.hot_token_id = parts.hot_token_id
        self._embed = parts.embed
        self._head = parts.head
        self.vocab_size = parts.head.vocab_size
        self._fc = Linear(
            reader.read("fc.weight", (hidden, 2 * hidden)),
            reader.read("fc.bias", (hidden,)) if "fc.bias" in reader else None,
        )
        self._layers = [
            LlamaLayer(model, reader, f"layers.{i}", shards, parts.collective, kernels)
            for i in range(model.num_layers)
        ]
        # Of the layers behind the first: fc's output enters that one as it is.
        self._input_norms = [
            RmsNorm(
                reader, f"layers.{i}.input_layernorm.weight", hidden, model.rms_norm_eps, kernels
            )
            for i in range(1, model.num_layers)
        ]
        self._cos_sin = make_cos_sin(model, parts.num_positions, reader.device)

    def forward(
        self,
        batch: Batch,
        hidden: Tensor,
        kv: KvBuffer,
        mode: CaptureHiddenMode = CaptureHiddenMode.LAST,
    ) -> ForwardOutput:
        cos_sin = self._cos_sin.index_select(0, batch.positions)
        x = self._fc(torch.cat([self._embed(batch.input_ids), hidden], dim=-1))
        residual = x
        for i, layer in enumerate(self._layers):
            if i > 0:
                x, residual = self._input_norms[i - 1].add(x, residual)
            x = layer.attention(x, cos_sin, batch, kv.k[i], kv.v[i])
            x, residual = layer.post_norm.add(x, residual)
            x = layer.mlp(x)
        features = x + residual
        chosen = batch.logit_indices
        wanted = features if chosen is None else features.index_select(0, chosen)
        logits = self._head(wanted)
        if mode is CaptureHiddenMode.NULL:
            return ForwardOutput(logits)
        return ForwardOutput(logits, features if mode is CaptureHiddenMode.FULL else wanted)
