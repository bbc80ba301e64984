"""Whether a draft's directory holds a head or a whole model. Loads no torch."""

from pathlib import Path

from paceline.worker.models.checkpoint_files import find_weight_files, open_weights
from paceline.worker.models.registry import read_config

_PICKLED = "pytorch_model.bin"
# Of config.json: what trainers of heads write and no model has.
_HEAD_KEYS = ("draft_vocab_size", "eagle_config", "target_hidden_size")
_HEAD_TYPES = ("architectures", "model_type", "speculators_model_type")
_HEAD_TENSORS = ("fc.weight", "hidden_norm.weight")


def is_head(path: Path) -> bool:
    """config.json says so, or else the names of the tensors: heads of EAGLE's authors call
    themselves Llama, and most come pickled, as no model that is served does.

    Raises: ConfigError: what is there cannot be read.
    """
    config = read_config(path)
    if any(key in config for key in _HEAD_KEYS):
        return True
    if any("eagle" in str(config.get(key, "")).lower() for key in _HEAD_TYPES):
        return True
    if (path / _PICKLED).is_file() and not any(path.glob("*.safetensors*")):
        return True
    for file in find_weight_files(path):
        with open_weights(file, "np") as handle:
            if any(name.endswith(_HEAD_TENSORS) for name in handle.keys()):  # noqa: SIM118
                return True
    return False
