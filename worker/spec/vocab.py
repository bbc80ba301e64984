"""A fingerprint of a vocabulary: a draft may only guess for a target whose ids mean the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

from paceline.worker.errors import ConfigError


def vocab_hash(model_dir: str | Path) -> bytes:
    """sha256 over the tokens of `tokenizer.json` in the order of their ids, added tokens included.

    Two vocabularies of equal hash give every id the same text; how text is split does not matter.
    Raises: ConfigError: there is no readable tokenizer.json.
    """
    path = Path(model_dir) / "tokenizer.json"
    try:
        tokens = _tokens_by_id(json.loads(path.read_text(encoding="utf-8")))
    except OSError as err:
        raise ConfigError(
            f"no tokenizer.json in {str(model_dir)!r} ({err.strerror}); "
            "the model directory must hold its tokenizer"
        ) from err
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(f"{str(path)!r} is not a tokenizer: {err}") from err
    digest = hashlib.sha256()
    for token_id, token in sorted(tokens.items()):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(f"{token_id} {len(text)} ".encode())
        digest.update(text)
    return digest.digest()


def _tokens_by_id(tokenizer: dict[str, Any]) -> dict[int, str]:  # Any: parsed JSON
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, dict):
        tokens = {int(token_id): str(token) for token, token_id in vocab.items()}
    else:  # a Unigram model lists [token, score] pairs
        tokens = {i: str(token) for i, (token, _) in enumerate(vocab)}
    for added in tokenizer.get("added_tokens") or ():
        tokens[int(added["id"])] = str(added["content"])
    return tokens
