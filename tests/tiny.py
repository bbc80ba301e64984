"""Tiny models: random Llama checkpoints of a few hundred KB with a byte-level tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 264  # 3 special tokens, 256 bytes, 5 spare
FAINT = 0.2  # a draft of 4 tokens then has 1.3 accepted
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    path: Path,
    *,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 8,
    hidden_size: int = 72,
    intermediate_size: int = 96,
    num_layers: int = 3,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = True,
    seed: int = 0,
    num_shards: int = 1,
    weight_scale: float = 0.25,
    faint_layers: Sequence[int] = (),
) -> Path:
    """Writes a Hugging Face directory of a random fp32 Llama; the same arguments, the same bytes.

    `weight_scale` is large enough that greedy output is varied, not one repeated token. Without
    its `faint_layers`, which add little, the model is a fair draft of itself.
    """
    path.mkdir(parents=True, exist_ok=True)
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen) * weight_scale

    state = {"model.embed_tokens.weight": rand(VOCAB_SIZE, hidden_size) * 4}
    for i in range(num_layers):
        pre = f"model.layers.{i}."
        state |= {
            pre + "input_layernorm.weight": 1 + 0.1 * rand(hidden_size),
            pre + "post_attention_layernorm.weight": 1 + 0.1 * rand(hidden_size),
            pre + "self_attn.q_proj.weight": rand(num_heads * head_dim, hidden_size),
            pre + "self_attn.k_proj.weight": rand(num_kv_heads * head_dim, hidden_size),
            pre + "self_attn.v_proj.weight": rand(num_kv_heads * head_dim, hidden_size),
            pre + "self_attn.o_proj.weight": rand(hidden_size, num_heads * head_dim),
            pre + "mlp.gate_proj.weight": rand(intermediate_size, hidden_size),
            pre + "mlp.up_proj.weight": rand(intermediate_size, hidden_size),
            pre + "mlp.down_proj.weight": rand(hidden_size, intermediate_size),
        }
    for i in faint_layers:
        state[f"model.layers.{i}.self_attn.o_proj.weight"] *= FAINT
        state[f"model.layers.{i}.mlp.down_proj.weight"] *= FAINT
    state["model.norm.weight"] = 1 + 0.1 * rand(hidden_size)
    if not tie_word_embeddings:
        state["lm_head.weight"] = rand(VOCAB_SIZE, hidden_size)
    _save_shards(path, state, num_shards)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    _save_tokenizer(path, max_position_embeddings)
    return path


def _save_shards(path: Path, state: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(state)
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: state[name] for name in names[shard::num_shards]}
        save_file(part, path / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _save_tokenizer(path: Path, max_len: int) -> None:
    special = ["<|im_start|>", "<|bos|>", "<|im_end|>"]  # ids 0, 1, 2; 2 is the end of sequence
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(special + alphabet)}
    vocab |= {f"<spare{i}>": len(vocab) + i for i in range(VOCAB_SIZE - len(vocab))}
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tok.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
