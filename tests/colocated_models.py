"""A tiny target and drafts of each kind that often guess right, so that trees are accepted in part.

The target's layers add little, so that its next token depends mostly on the last one; the drafts
know it as a function of the last token alone.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.worker.config import SpecMethod
from tests.tiny import make_tiny_model
from tests.tiny_heads import HeadSizes, make_eagle3_head, make_eagle_head

HIDDEN, HEAD_DIM, NUM_HEADS = 72, 8, 9
# Of 264; the tokens of a head that knows part of the vocabulary.
HOT_TOKENS = [i for i in range(264) if i % 5]
_FAINT = 0.03
_SHARP = 6.0  # how sharply an EAGLE-3 head attends to its own token


@dataclass(frozen=True)
class ColocatedModels:
    target: Path
    drafts: dict[SpecMethod, Path]


def make_colocated_models(path: Path) -> ColocatedModels:
    target = make_tiny_model(path / "target", tie_word_embeddings=False)
    _scale_layers(target, _FAINT)
    return ColocatedModels(
        target,
        {
            "eagle": make_knowing_eagle_head(path / "eagle"),
            "eagle3": make_knowing_eagle3_head(path / "eagle3", target),
            "standalone": copy_without_last_layer(path / "standalone", target),
        },
    )


def copy_without_last_layer(path: Path, target: Path) -> Path:
    shutil.copytree(target, path)
    config = json.loads((path / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_knowing_eagle_head(path: Path) -> Path:
    """Its feature is the embedding of the token it reads."""
    head = make_eagle_head(path, layout="model.layers")
    _scale_layers(path, 0.0)
    fc = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    _rewrite(path, {"model.fc.weight": fc, "model.fc.bias": torch.zeros(HIDDEN)})
    return head.path


def make_knowing_eagle3_head(path: Path, target: Path) -> Path:
    """Attends to its own token above all, and passes its embedding on."""
    sizes = HeadSizes(num_kv_heads=NUM_HEADS)
    head = make_eagle3_head(path, sizes, hot_tokens=HOT_TOKENS, layout="midlayer")
    eye = torch.eye(HIDDEN)
    reads_token = torch.cat([eye, torch.zeros(HIDDEN, HIDDEN)], 1)
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    _scale_layers(path, 0.0)
    changed = {
        "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": _SHARP * reads_token,
        "midlayer.self_attn.k_proj.weight": _SHARP * reads_token,
        "midlayer.self_attn.v_proj.weight": reads_token,
        "midlayer.self_attn.o_proj.weight": eye,
        "lm_head.weight": lm_head[HOT_TOKENS].clone(),
    }
    _rewrite(path, changed)
    return head.path


def _scale_layers(path: Path, factor: float) -> None:
    """What each layer adds, times `factor`."""
    tensors = load_file(path / "model.safetensors")
    added = ("o_proj.weight", "down_proj.weight")
    _rewrite(path, {name: x * factor for name, x in tensors.items() if name.endswith(added)})


def _rewrite(path: Path, changed: dict[str, Tensor]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    assert set(changed) <= set(tensors), set(changed) - set(tensors)
    save_file({**tensors, **changed}, file, metadata={"format": "pt"})
