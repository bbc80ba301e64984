"""A Llama GGUF file → a Hugging Face directory: dequantised weights, config and tokenizer.

Written for byte-level BPE vocabularies of the "smollm" kind; others are refused, not guessed at.
Source: the GGUF specification; tensor names and the rotary row order are llama.cpp's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.cluster.models.catalog import Progress
from paceline.cluster.models.hf_directory import write_config, write_json, write_weights
from paceline.worker.errors import ConfigError

# Any: GGUF metadata values are numbers, strings, flags and lists of them.
Metadata = Mapping[str, Any]
Array = np.ndarray[Any, np.dtype[np.float32]]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like


def convert_gguf(file: Path, out: Path, dtype: str, progress: Progress) -> None:
    """Writes the checkpoint of `file` into the directory `out`.

    Raises: ConfigError: not a Llama with a "smollm" tokenizer.
    """
    import torch

    reader = gguf.GGUFReader(file)
    meta: Metadata = {key: field.contents() for key, field in reader.fields.items()}
    _refuse_others(file, meta)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = make_config(meta, tie_word_embeddings=tied)
    num_heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    state = {}
    for i, tensor in enumerate(reader.tensors):
        if i % 16 == 0:
            progress("converting the weights", 0.9 * i / len(reader.tensors))
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in num_heads:
            weight = unpermute_rotary(weight, num_heads[part])
        state[_hf_name(tensor.name)] = torch.from_numpy(weight.copy()).to(getattr(torch, dtype))
    progress("writing the checkpoint", 0.9)
    write_weights(out, state)
    write_config(out, config, dtype)
    _write_tokenizer(out, meta)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(out / "generation_config.json", {key: config[key] for key in ids})
    progress("checkpoint ready", 1.0)


def unpermute_rotary(weight: Array, num_heads: int) -> Array:
    """Rows of a Q or K projection from llama.cpp's interleaved rotary order to the half-split one.

    Each head's rows (0, 1, 2, 3, …) hold (first half 0, second half 0, first half 1, …). A model
    with the rows left as they are still writes fluent text, only worse.
    """
    head_dim = weight.shape[0] // num_heads
    pairs = weight.reshape(num_heads, head_dim // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def make_config(meta: Metadata, *, tie_word_embeddings: bool) -> dict[str, Any]:
    """The values of config.json, without the dtype."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rope_theta": meta["llama.rope.freq_base"],
        "rope_scaling": None,
        # Stored as a float32: 1e-05 comes back as 9.999999747e-06.
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def make_tokenizer(meta: Metadata) -> Tokenizer:
    """Byte-level BPE whose pre-tokenizer splits off each digit, then words as GPT-2 does."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _refuse_others(file: Path, meta: Metadata) -> None:
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in wanted.items():
        if meta.get(key) != value:
            raise ConfigError(
                f"'{file.name}' has {key} {meta.get(key)!r}; only {value!r} is converted; "
                "give the path of a Hugging Face directory instead"
            )


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}"


def _write_tokenizer(out: Path, meta: Metadata) -> None:
    tokens = meta["tokenizer.ggml.tokens"]
    named = {
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
    }
    make_tokenizer(meta).save(str(out / "tokenizer.json"))
    write_json(out / "special_tokens_map.json", named)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "add_bos_token": meta["tokenizer.ggml.add_bos_token"],
            **named,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )
