"""`transformers` as the judge of greedy output: one prompt at a time, fp32, on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Verdict:
    token_ids: list[int]
    gaps: list[float]  # of each token: how far its logit is above the next best


class Judge:
    """Generates each prompt once, to the longest length that was asked for."""

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._known: dict[tuple[int, ...], tuple[int, Verdict]] = {}

    def outputs(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        return [self._generate(prompt, max_tokens).token_ids[:max_tokens] for prompt in prompts]

    def smallest_gap(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """How near to a tie any choice was; rounding must stay far below it."""
        return min(
            gap
            for prompt in prompts
            for gap in self._generate(prompt, max_tokens).gaps[:max_tokens]
        )

    def differences(
        self, prompts: Sequence[list[int]], outputs: Sequence[list[int]], max_tokens: int
    ) -> list[str]:
        """A line for each output that is not the judge's: where, what, and how sure it was."""
        lines = []
        for i, (prompt, got) in enumerate(zip(prompts, outputs, strict=True)):
            verdict = self._generate(prompt, max_tokens)
            want = verdict.token_ids[:max_tokens]
            if got != want:
                place = next(
                    (k for k, (x, y) in enumerate(zip(got, want, strict=False)) if x != y),
                    min(len(got), len(want)),
                )
                gap = verdict.gaps[min(place, len(verdict.gaps) - 1)]
                lines.append(
                    f"prompt {i}, token {place}: got {got[place : place + 4]}, "
                    f"want {want[place : place + 4]}, logit gap {gap:.6f}"
                )
        return lines

    def _generate(self, prompt: list[int], max_tokens: int) -> Verdict:
        known_len, verdict = self._known.get(tuple(prompt), (0, None))
        if verdict is not None and known_len >= max_tokens:
            return verdict
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=2,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(out.logits).topk(2).values  # [num_new, 2]
        gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
        verdict = Verdict(out.sequences[0, len(prompt) :].tolist(), gaps)
        self._known[tuple(prompt)] = (max_tokens, verdict)
        return verdict
