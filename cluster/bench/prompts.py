"""The prompts that speculation is measured on: chat, code to continue, and chat about code.

Token ids of SmolLM2's vocabulary, chat ones in its template. No draft shipped here has seen them.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_FILE = Path(__file__).with_name("eval-prompts.json")


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    kind: str  # chat, code or codechat
    ids: tuple[int, ...]

    @property
    def is_code(self) -> bool:
        return self.kind != "chat"


@lru_cache(maxsize=1)
def load_eval_prompts() -> tuple[EvalPrompt, ...]:
    """All of them, kind after kind."""
    found = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(EvalPrompt(entry["kind"], tuple(entry["prompt"])) for entry in found)
