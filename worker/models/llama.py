"""Llama: the layers of one rank and their forward."""

from collections.abc import Callable

from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import Batch
from paceline.worker.cache.kv_buffer import KvBuffer
from paceline.worker.config import ModelConfig
from paceline.worker.layers.attention import Attention
from paceline.worker.layers.embedding import LmHead, VocabEmbedding
from paceline.worker.layers.linear import Linear, load_column, load_qkv, load_row
from paceline.worker.layers.norm_rotary import RmsNorm, make_cos_sin
from paceline.worker.models.weights import WeightReader
from paceline.worker.parallel.collective import Collective
from paceline.worker.parallel.shards import HeadShard, Span, split_evenly, split_heads

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
        self.heads = split_heads(config.num_heads, config.num_kv_heads, collective.tp_size)[
            collective.tp_rank
        ]
        mlp = split_evenly(config.intermediate_size, collective.tp_size, _MLP_MULTIPLE)[
            collective.tp_rank
        ]
        vocab_size, hidden = config.vocab_size, config.hidden_size
        self._embed = VocabEmbedding(
            reader, "model.embed_tokens.weight", vocab_size, hidden, collective
        )
        kept = [i for i in range(config.num_layers) if i not in config.skip_layers]
        self._layers: list[_Layer] = []
        for i in kept:
            self._layers.append(
                _Layer(config, reader, f"model.layers.{i}", self.heads, mlp, collective, kernels)
            )
            if progress is not None:
                progress(len(self._layers) / len(kept))
        self._norm = RmsNorm(reader, "model.norm.weight", hidden, config.rms_norm_eps, kernels)
        if config.tie_word_embeddings:
            self._head = LmHead(self._embed.weight, vocab_size, collective)
        else:
            self._head = LmHead.load(reader, "lm_head.weight", vocab_size, hidden, collective)
        self._cos_sin = make_cos_sin(config, num_positions, reader.device)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def forward(self, batch: Batch, kv: KvBuffer) -> Tensor | None:
        """Stores the batch's KV; logits [num_logits, vocab_size] fp32 on rank 0, None elsewhere."""
        cos_sin = self._cos_sin.index_select(0, batch.positions)
        residual = self._embed(batch.input_ids)
        layers = self._layers
        x = layers[0].input_norm(residual)
        for i, layer in enumerate(layers):
            x = layer.attention(x, cos_sin, batch, kv.k[i], kv.v[i])
            x, residual = layer.post_norm.add(x, residual)
            x = layer.mlp(x)
            if i + 1 < len(layers):
                x, residual = layers[i + 1].input_norm.add(x, residual)
        if batch.logit_indices is not None:
            x = x.index_select(0, batch.logit_indices)
            residual = residual.index_select(0, batch.logit_indices)
        x, _ = self._norm.add(x, residual)
        return self._head(x)


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        prefix: str,
        heads: HeadShard,
        mlp: Span,
        collective: Collective,
        kernels: KernelSet,
    ) -> None:
        hidden, head_dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.input_norm = RmsNorm(reader, f"{prefix}.input_layernorm.weight", hidden, eps, kernels)
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
            hidden,
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
