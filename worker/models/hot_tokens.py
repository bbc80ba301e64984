"""Hot tokens: the target ids behind the ids of a head that knows only part of the vocabulary."""

import json
import pickle
from pathlib import Path

import torch
from torch import Tensor

from paceline.worker.errors import ConfigError


def hot_tokens_from_offsets(d2t: Tensor, vocab_size: int, path: str) -> Tensor:
    """d2t [n]: how far target id lies above draft id -> [n] int64 target ids.

    Raises: ConfigError: an id outside the target's vocabulary; `path` is the head it names.
    """
    ids = d2t.to(torch.int64) + torch.arange(d2t.shape[0])
    _check(ids, vocab_size, f"d2t of the head in '{path}'")
    return ids


def load_token_map(path: str | Path, vocab_size: int) -> Tensor:
    """A file with target ids, a JSON list or a tensor that torch saved -> [n] int64, ascending.

    Raises: ConfigError: no such file, something else in it, an id twice or outside the vocabulary.
    """
    path = Path(path)
    try:
        found = (
            json.loads(path.read_bytes())
            if path.suffix == ".json"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
        ids = torch.as_tensor(found)
    except OSError as error:
        raise ConfigError(f"token map '{path}' cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"token map '{path}' is neither a JSON list of ids nor a saved tensor of them: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    if ids.ndim != 1 or ids.shape[0] == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ConfigError(f"token map '{path}' must hold a list of token ids, at least one")
    ids = ids.to(torch.int64)
    _check(ids, vocab_size, f"token map '{path}'")
    return ids.sort().values


def _check(ids: Tensor, vocab_size: int, what: str) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.shape[0]:
        raise ConfigError(
            f"{what} leads to token {int(outside[0])}, but the target has tokens 0 to "
            f"{vocab_size - 1}; use one made for this target"
        )
    if ids.unique().shape[0] != ids.shape[0]:
        raise ConfigError(f"{what} leads to a token twice; each may be there once")
