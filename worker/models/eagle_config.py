"""What an EAGLE head says of itself, and whether it fits its target.

The kind of head is read off its tensors, since the same architecture names stand for several.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError
from paceline.worker.models.eagle_weights import open_head
from paceline.worker.models.hidden import HiddenCapture
from paceline.worker.models.registry import (
    Json,
    parse_model_config,
    read_config,
    read_count,
    refuse_unsupported,
)
from paceline.worker.spec.spec_info import CaptureHiddenMode
from paceline.worker.spec.vocab import vocab_hash

HeadKind = Literal["eagle", "eagle3"]

# Parts of a layer, without their layer; anything else means another architecture.
_LAYER_PARTS = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "self_attn.rotary_emb",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "hidden_norm",
}
_OTHER_PARTS = {"fc", "embed_tokens", "lm_head", "norm", "input_norm", "d2t", "t2d"}
# Options of some trainers that change what a head computes.
_UNSUPPORTED = ("fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    kind: HeadKind
    model: ModelConfig  # sizes of the head's layers; max_model_len and dtype are the target's
    target: ModelConfig
    taps: tuple[int, ...]  # ascending; empty: it reads the target's final norm
    draft_vocab_size: int  # what its logits are over
    has_own_head: bool
    has_own_embedding: bool
    has_fc: bool
    norm_before_fc: bool
    norm_before_residual: bool

    @property
    def feature_size(self) -> int:
        """Width of the hidden states it is fed from the target."""
        return self.target.hidden_size * max(len(self.taps), 1)

    def capture(self, mode: CaptureHiddenMode) -> HiddenCapture:
        """What the target has to hand over for it."""
        return HiddenCapture(mode, self.taps)


def load_eagle_config(path: str | Path, target: ModelConfig) -> EagleConfig:
    """What a directory with an EAGLE-1, -2 or -3 head for Llama says of itself.

    Raises:
        NotFound: no such directory.
        ConfigError: not such a head, or not one for this target, with the reason.
    """
    path = Path(path)
    config = read_config(path)
    nested = config.get("transformer_layer_config")  # where speculators keep the layer's settings
    if isinstance(nested, dict):
        config = {**config, **nested}
    refuse_unsupported(path, config)
    for option in _UNSUPPORTED:
        if _option(config, option):
            raise ConfigError(f"the head in '{path}' has {option}, which is not supported")
    tensors = open_head(path)
    kind = _kind(path, tensors)
    architecture = "EagleLlamaForCausalLM" if kind == "eagle" else "Eagle3LlamaForCausalLM"
    model = replace(
        parse_model_config(path, config, architecture, dtype=target.dtype),
        max_model_len=target.max_model_len,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors
        or "layers.0.self_attn.qkv_proj.bias" in tensors,
        mlp_bias="layers.0.mlp.down_proj.bias" in tensors,
    )
    _check_vocabulary(path, model, target)
    _check_widths(path, config, model, target, kind, tensors)
    if kind == "eagle3" and model.num_layers != 1:
        raise ConfigError(
            f"the EAGLE-3 head in '{path}' has num_hidden_layers {model.num_layers}, must be 1"
        )
    draft_vocab_size, has_own_head = _vocabulary(path, config, model, kind, tensors)
    head = EagleConfig(
        kind=kind,
        model=model,
        target=target,
        taps=_taps(path, config, target) if kind == "eagle3" else (),
        draft_vocab_size=draft_vocab_size,
        has_own_head=has_own_head,
        has_own_embedding=model.hidden_size != target.hidden_size,
        has_fc=True,
        norm_before_fc=kind == "eagle3" and bool(_option(config, "norm_before_fc")),
        norm_before_residual=kind == "eagle3" and bool(_option(config, "norm_before_residual")),
    )
    if kind == "eagle3" and head.feature_size == model.hidden_size:
        head = replace(head, has_fc=False)
    _check_fc(path, head, tensors)
    return head


def _option(config: Json, name: str) -> object:
    """Of config.json itself, or of its `eagle_config`."""
    nested = config.get("eagle_config")
    inner = nested.get(name) if isinstance(nested, dict) else None
    return inner if inner is not None else config.get(name)


def _kind(path: Path, tensors: Mapping[str, Tensor]) -> HeadKind:
    if strange := sorted(name for name in tensors if not _is_known(name)):
        raise ConfigError(
            f"'{path}' is not an EAGLE head for Llama: it holds {', '.join(strange[:4])}"
            f"{' and more' if len(strange) > 4 else ''}; use a head with Llama layers"
        )
    if "layers.0.hidden_norm.weight" in tensors:
        return "eagle3"
    if "fc.weight" in tensors:
        return "eagle"
    raise ConfigError(
        f"'{path}' is not an EAGLE head: it has neither fc.weight (EAGLE-1 and -2) nor "
        "midlayer.hidden_norm.weight (EAGLE-3); a draft that is a whole model is method standalone"
    )


def _is_known(name: str) -> bool:
    if name.startswith("layers."):
        part = name.split(".", 2)[-1]
        return part.rpartition(".")[0] in _LAYER_PARTS
    return name.partition(".")[0] in _OTHER_PARTS


def _check_vocabulary(path: Path, model: ModelConfig, target: ModelConfig) -> None:
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the head in '{path}' is for a vocabulary of {model.vocab_size} tokens, its target "
            f"in '{target.path}' has {target.vocab_size}; use a head trained for this target"
        )
    if (path / "tokenizer.json").is_file() and vocab_hash(path) != vocab_hash(target.path):
        raise ConfigError(
            f"the tokenizer in '{path}' is not that of its target in '{target.path}'; "
            "use a head trained for this target"
        )


def _check_widths(
    path: Path,
    config: Json,
    model: ModelConfig,
    target: ModelConfig,
    kind: HeadKind,
    tensors: Mapping[str, Tensor],
) -> None:
    hidden = model.hidden_size
    expected = read_count(path, config, "target_hidden_size", target.hidden_size)
    if expected != target.hidden_size:
        raise ConfigError(
            f"the head in '{path}' reads hidden states of width {expected}, its target in "
            f"'{target.path}' has hidden_size {target.hidden_size}; use a head trained for it"
        )
    if hidden == target.hidden_size:
        return
    if kind == "eagle":
        raise ConfigError(
            f"the head in '{path}' has hidden_size {hidden}, its target in '{target.path}' has "
            f"{target.hidden_size}; an EAGLE-1 or -2 head shares its target's embedding and head, "
            "so use one trained for it"
        )
    if "embed_tokens.weight" not in tensors:
        raise ConfigError(
            f"the head in '{path}' has hidden_size {hidden}, so it cannot share the embedding of "
            f"its target with hidden_size {target.hidden_size}, and it holds no embed_tokens.weight"
        )
    if "lm_head.weight" not in tensors and not model.tie_word_embeddings:
        raise ConfigError(
            f"the head in '{path}' has hidden_size {hidden}, so it cannot share the lm_head of its "
            f"target with hidden_size {target.hidden_size}, and it holds no lm_head.weight"
        )


def _vocabulary(
    path: Path, config: Json, model: ModelConfig, kind: HeadKind, tensors: Mapping[str, Tensor]
) -> tuple[int, bool]:
    """(what the logits are over, whether the checkpoint's own lm_head makes them)."""
    size = read_count(path, config, "draft_vocab_size", model.vocab_size)
    if kind == "eagle":
        return model.vocab_size, False
    if size > model.vocab_size:
        raise ConfigError(
            f"the head in '{path}' has draft_vocab_size {size}, more than its vocab_size "
            f"{model.vocab_size}"
        )
    has_own_head = "lm_head.weight" in tensors
    if size < model.vocab_size:
        for needed in ("lm_head.weight", "d2t"):
            if needed not in tensors:
                raise ConfigError(
                    f"the head in '{path}' has draft_vocab_size {size} of {model.vocab_size} "
                    f"tokens, but its checkpoint lacks {needed}"
                )
    return size, has_own_head


def _taps(path: Path, config: Json, target: ModelConfig) -> tuple[int, ...]:
    """The layers whose entering states it reads, ascending.

    `eagle_config` names layers by their output, one less than the tap; the same key outside of it,
    as speculators write it, holds taps.
    """
    num_layers = target.num_layers - len(target.skip_layers)
    key = "eagle_aux_hidden_state_layer_ids"
    if _option(config, "use_aux_hidden_state") is False:
        return ()
    nested = config.get("eagle_config")
    in_eagle_config = nested.get(key) if isinstance(nested, dict) else None
    if in_eagle_config is not None:
        ids, offset, source = in_eagle_config, 1, f"eagle_config.{key}"
    elif config.get(key) is not None:
        ids, offset, source = config[key], 0, key
    else:
        ids, offset, source = [2, num_layers // 2, num_layers - 3], 0, "the default"
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ConfigError(f"the head in '{path}' has {source} {ids!r}, must be a list of layers")
    taps = sorted({i + offset for i in ids})
    if taps[0] < 0 or taps[-1] > num_layers or len(taps) != len(ids):
        raise ConfigError(
            f"the head in '{path}' reads hidden states at {source} {ids}, but its target in "
            f"'{target.path}' has {num_layers} layers: each must be once and from {-offset} to "
            f"{num_layers - offset}; use a head trained for it, or set eagle_config.{key}"
        )
    return tuple(taps)


def _check_fc(path: Path, head: EagleConfig, tensors: Mapping[str, Tensor]) -> None:
    if not head.has_fc:
        return
    hidden = head.model.hidden_size
    inputs = 2 * hidden if head.kind == "eagle" else head.feature_size
    if "fc.weight" not in tensors:
        raise ConfigError(
            f"the head in '{path}' lacks fc.weight, which would bring the {inputs} features of its "
            f"target to its hidden_size {hidden}"
        )
    found = list(tensors["fc.weight"].shape)
    if found != [hidden, inputs]:
        what = (
            "its hidden_size twice"
            if head.kind == "eagle"
            else f"{max(len(head.taps), 1)} x the target's hidden_size {head.target.hidden_size}, "
            f"taps {list(head.taps)}"
        )
        raise ConfigError(
            f"fc.weight of the head in '{path}' has shape {found}, must be [{hidden}, {inputs}] "
            f"({what}); use a head trained for the target in '{head.target.path}'"
        )
