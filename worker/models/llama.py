"""Llama: the layers of one rank and their forward."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer
from paceline.worker.config import ModelConfig
from paceline.worker.layers.attention import Attention
from paceline.worker.layers.embedding import LmHead, VocabEmbedding
from paceline.worker.layers.linear import Linear, load_column, load_qkv, load_row
from paceline.worker.layers.norm_rotary import RmsNorm, make_cos_sin
from paceline.worker.models.hidden import NO_CAPTURE, ForwardOutput, HiddenCapture, TapBuffer
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.shards import HeadShard, Span, split_evenly, split_heads
from paceline.worker.spec.spec_info import CaptureHiddenMode

# Columns of the feed-forward are cut at multiples of this, so that no rank gets odd tiles.
_MLP_MULTIPLE = 32


class LlamaModel:
    """Reads its shard at once; `forward` computes and keeps nothing but the KV it stores."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        collective: Collective,
        kernels: KernelSet,
        num_positions: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """num_positions: rows of the rotary table; progress: told the fraction read, 0 to 1."""
        shards = LayerShards.of(config, collective)
        self.heads = shards.heads
        vocab_size, hidden, eps = config.vocab_size, config.hidden_size, config.rms_norm_eps
        self.embed = VocabEmbedding(
            reader, "model.embed_tokens.weight", vocab_size, hidden, collective
        )
        kept = [i for i in range(config.num_layers) if i not in config.skip_layers]
        self._input_norms: list[RmsNorm] = []
        self._layers: list[LlamaLayer] = []
        for i in kept:
            prefix = f"model.layers.{i}"
            self._input_norms.append(
                RmsNorm(reader, f"{prefix}.input_layernorm.weight", hidden, eps, kernels)
            )
            self._layers.append(LlamaLayer(config, reader, prefix, shards, collective, kernels))
            if progress is not None:
                progress(len(self._layers) / len(kept))
        self._norm = RmsNorm(reader, "model.norm.weight", hidden, eps, kernels)
        if config.tie_word_embeddings:
            self.head = LmHead(self.embed.weight, vocab_size, collective, reader.tiles)
        else:
            self.head = LmHead.load(reader, "lm_head.weight", vocab_size, hidden, collective)
        self._cos_sin = make_cos_sin(config, num_positions, reader.device)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def forward(
        self, batch: Batch, kv: KvBuffer, capture: HiddenCapture = NO_CAPTURE
    ) -> ForwardOutput:
        """Stores the batch's KV. Taps count the layers that are kept."""
        cos_sin = self._cos_sin.index_select(0, batch.positions)
        residual = self.embed(batch.input_ids)
        layers, norms = self._layers, self._input_norms
        taps = None
        if capture.mode is not CaptureHiddenMode.NULL and capture.taps:
            assert 0 <= capture.taps[0] <= capture.taps[-1] <= len(layers), capture.taps
            taps = TapBuffer(capture, batch, residual)
        x = norms[0](residual)
        for i, layer in enumerate(layers):
            if taps is not None:
                taps.take(i, residual)
            x = layer.attention(x, cos_sin, batch, kv.k[i], kv.v[i])
            x, residual = layer.post_norm.add(x, residual)
            x = layer.mlp(x)
            if i + 1 < len(layers):
                x, residual = norms[i + 1].add(x, residual)
        chosen = batch.logit_indices
        # The final norm runs on the rows that logits are wanted of, unless a capture wants all.
        is_full = capture.mode is CaptureHiddenMode.FULL and (taps is None or taps.has(len(layers)))
        if chosen is not None and not is_full:
            x = x.index_select(0, chosen)
            residual = residual.index_select(0, chosen)
        x, residual = self._norm.add(x, residual)
        hidden = None
        if taps is not None:
            taps.take_chosen(len(layers), residual)
            hidden = taps.hidden()
        elif capture.mode is not CaptureHiddenMode.NULL:
            hidden = x
        if chosen is not None and is_full:
            x = x.index_select(0, chosen)
        return ForwardOutput(self.head(x), hidden)


@dataclass(frozen=True, slots=True)
class LayerShards:
    """This rank's part of every layer."""

    heads: HeadShard
    mlp: Span

    @classmethod
    def of(cls, config: ModelConfig, collective: Collective) -> "LayerShards":
        tp_rank, tp_size = collective.tp_rank, collective.tp_size
        return cls(
            split_heads(config.num_heads, config.num_kv_heads, tp_size)[tp_rank],
            split_evenly(config.intermediate_size, tp_size, _MLP_MULTIPLE)[tp_rank],
        )


class LlamaLayer:
    """Attention, norm, feed-forward. What is normed before attention, and how, is its owner's."""

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        prefix: str,
        shards: LayerShards,
        collective: Collective,
        kernels: KernelSet,
        *,
        attention_size: int = 0,
    ) -> None:
        """attention_size: width of what attention reads; 0 for hidden_size."""
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        heads, mlp = shards.heads, shards.mlp
        self.post_norm = RmsNorm(
            reader, f"{prefix}.post_attention_layernorm.weight", hidden, eps, kernels
        )
        qkv = load_qkv(
            reader,
            f"{prefix}.self_attn",
            heads,
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            attention_size or hidden,
            bias=config.attention_bias,
        )
        o_proj = load_row(
            reader,
            f"{prefix}.self_attn.o_proj",
            hidden,
            config.num_heads * head_dim,
            Span(heads.queries.start * head_dim, heads.queries.stop * head_dim),
            collective,
            bias=config.attention_bias,
        )
        self.attention = Attention(qkv, o_proj, heads, head_dim, kernels)
        gate_up = load_column(
            reader,
            (f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
            config.intermediate_size,
            hidden,
            mlp,
            bias=config.mlp_bias,
        )
        down = load_row(
            reader,
            f"{prefix}.mlp.down_proj",
            hidden,
            config.intermediate_size,
            mlp,
            collective,
            bias=config.mlp_bias,
        )
        self.mlp = _Mlp(gate_up, down, kernels)


class _Mlp:
    def __init__(self, gate_up: Linear, down: Linear, kernels: KernelSet) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activate = kernels.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activate(self._gate_up(x)))
