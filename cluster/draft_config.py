"""The [draft] section of a ClusterConfig: where guesses come from and how they are verified.

What is not given depends on what the draft turns out to be, a head or a model, and on the device
that computes it. Reads no checkpoint: cluster/preflight.py finds out the method.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.worker.config import SpecConfig, SpecMethod
from paceline.worker.errors import ConfigError
from paceline.worker.spec.limits import (
    MAX_DRAFT_TOKENS,
    MAX_NUM_STEPS,
    MAX_TOPK,
    as_chain,
    check_spec_config,
    settle_spec_config,
)

WITHOUT_MODEL = ("none", "ngram")  # methods, which --draft takes for a model as well
HEADS = ("eagle", "eagle3")

# (num_steps, topk, num_draft_tokens) of who gave none of them. On a GPU to verify a few tokens more
# costs next to nothing. On a CPU every forward of the head counts: with the head of a 135M model
# and one request, 3 steps of 2 branches made 1.82 times the tokens of plain decoding (code 2.06),
# chains of 4 1.78 (1.96) and 5 steps of 4 branches 1.82 (1.97).
_CHAIN = (4, 1, 5)
_ON_CPU = {"eagle": (3, 2, 5), "eagle3": (3, 2, 5)}
_ON_GPU = {"eagle": (5, 4, 8), "eagle3": (5, 4, 8), "standalone": (3, 1, 4)}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class DraftSection(Section):
    """Where guesses come from. `model` "auto" takes the draft shipped for the model, if any."""

    # "auto": as the model is, a head or a whole model; without one, as the target's catalog says.
    method: Literal["auto", "none", "ngram", "standalone", "eagle", "eagle3"] = "auto"
    model: str = ""
    # "auto": heads on the target's own ranks, whole models in groups of their own.
    placement: Literal["auto", "decoupled", "colocated"] = "auto"
    groups: int = Field(default=1, ge=1, le=1024)
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    # Of trees; 0 takes what suits method and device, or for nodes num_steps * topk + 1.
    num_steps: int = Field(default=0, ge=0, le=MAX_NUM_STEPS)  # depth
    topk: int = Field(default=0, ge=0, le=MAX_TOPK)  # branches kept per depth
    num_draft_tokens: int = Field(default=0, ge=0, le=MAX_DRAFT_TOKENS)  # nodes with the root
    adaptive: bool = True  # shallower trees, or none, where they do not pay
    overlap: Literal["auto", "on", "off"] = "auto"  # of steps; auto: on a GPU
    token_map: str = ""  # file of the ids that an EAGLE-1 or -2 head may guess
    ngram_corpus: str = ""  # file of texts that n-gram guesses may come from
    rule: Literal["coupled", "rejection"] = "coupled"  # how drafts are accepted
    threshold_single: float = 1.0  # rejection: below 1 accepts what the target would not
    threshold_acc: float = 1.0
    simulated_accept_length: float = 0.0  # for benchmarks: answers are made up
    simulated_method: Literal["match-expected", "multinomial"] = "match-expected"
    timeout_s: float = Field(default=1.0, gt=0)  # how long a step waits for proposals at most
    fallback: Literal["none", "ngram"] = "none"  # what guesses while no draft answers

    @model_validator(mode="before")
    @classmethod
    def _methods_are_models(cls, data: Any) -> Any:  # Any: as given
        """`model` "ngram" or "none" means the method; a folder of that name is "./ngram"."""
        if isinstance(data, dict) and data.get("model") in WITHOUT_MODEL:
            method = data.get("method", "auto")
            if method in ("auto", data["model"]):
                return {**data, "method": data["model"], "model": ""}
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> "DraftSection":
        if self.method in ("standalone", *HEADS) and not self.model:
            raise ValueError(
                f"method is '{self.method}' but model is empty; name a draft or 'auto'"
            )
        if self.method in WITHOUT_MODEL and self.model:
            raise ValueError(
                f"model is '{self.model}' but method is '{self.method}'; leave out one of them"
            )
        if self.method == "none" and self.simulated_accept_length:
            raise ValueError(
                f"simulated_accept_length is {self.simulated_accept_length:g}, but nothing drafts; "
                "name a draft, or leave it out"
            )
        if self.method in HEADS and self.placement == "decoupled":
            raise ValueError(
                f"method is '{self.method}' but placement is 'decoupled': a head reads its "
                "target's hidden states, so it runs on the target's ranks; leave placement out"
            )
        if self.is_colocated:
            self._check_colocated()
        if self.ngram_corpus and not self._may_use_ngram:
            raise ValueError(
                f"ngram_corpus is '{self.ngram_corpus}', but no n-gram drafter guesses: method is "
                f"'{self.method}', fallback '{self.fallback}'; use method 'ngram', or fallback "
                "'ngram' with a draft in groups of its own"
            )
        try:
            for device in ("cpu", "cuda"):
                check_spec_config(as_chain(self._spec_config(device)))
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def _check_colocated(self) -> None:
        for name, value in (
            ("tensor_parallel_size", self.tensor_parallel_size),
            ("groups", self.groups),
        ):
            if value > 1:
                raise ValueError(
                    f"{name} is {value}, but a colocated draft runs on the target's own ranks; "
                    "leave it out, or use a standalone draft with placement 'decoupled'"
                )
        if self.fallback != "none":
            raise ValueError(
                f"fallback is '{self.fallback}', but a colocated draft is there whenever its "
                "target is; leave it out"
            )

    @property
    def _may_use_ngram(self) -> bool:
        """Whether the n-gram drafter guesses, or may once the method is known."""
        if self.method == "auto" and not self.model:
            return True  # as the target's catalog says
        return self.method == "ngram" or (
            self.fallback == "ngram" and self.method in ("auto", "standalone")
        )

    @property
    def is_decoupled(self) -> bool:
        """Whether the draft has groups of its own."""
        return self.method == "standalone" and self.placement != "colocated"

    @property
    def is_colocated(self) -> bool:
        """Whether the target's ranks compute the draft."""
        return self.method in HEADS or (
            self.placement == "colocated" and self.method == "standalone"
        )

    def spec_config(self, device: str = "cpu") -> SpecConfig:
        """Once the method is known; the draft's directory is each node's own to find."""
        return settle_spec_config(self._spec_config(device))

    def _spec_config(self, device: str) -> SpecConfig:
        method: SpecMethod = "none"
        if self.method != "auto":
            method = self.method
        elif self.model:
            method = "eagle"  # of those that it may turn out to be, the one that allows most
        num_steps, topk, num_draft_tokens = self._tree(device)
        return SpecConfig(
            method=method,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            draft_timeout_s=self.timeout_s,
            placement="decoupled" if self.is_decoupled else "colocated",
            overlap=self.overlap,
            token_map=self.token_map,
            # With the method it is known whether a fallback can read one.
            ngram_corpus="" if self.method == "auto" else self.ngram_corpus,
            rule=self.rule,
            threshold_single=self.threshold_single,
            threshold_acc=self.threshold_acc,
            adaptive=self.adaptive,
            simulated_accept_length=self.simulated_accept_length,
            simulated_method=self.simulated_method,
        )

    def _tree(self, device: str) -> tuple[int, int, int]:
        trees = _ON_GPU if device.startswith("cuda") else _ON_CPU
        tree = trees.get(self.method, _CHAIN) if self.is_colocated else _CHAIN
        num_steps, topk = self.num_steps or tree[0], self.topk or tree[1]
        if self.num_draft_tokens:
            return num_steps, topk, self.num_draft_tokens
        if (num_steps, topk) == tree[:2]:
            return tree
        return num_steps, topk, min(num_steps * topk + 1, MAX_DRAFT_TOKENS)


def change_draft(section: DraftSection, **changes: str) -> DraftSection:
    """The section with other values.

    Raises: ConfigError: they do not go with the rest.
    """
    try:
        return DraftSection.model_validate(section.model_dump() | changes)
    except ValidationError as error:
        reasons = (str(fault["ctx"]["error"]) for fault in error.errors() if "ctx" in fault)
        raise ConfigError(f"[draft] {'; '.join(reasons) or error}") from error


# vLLM's keys of --speculative-config, and all of ours; the flat aliases of SGLang are flags.
_SPEC_KEYS = {
    "num_speculative_tokens": "draft.num_steps",
    "draft_tensor_parallel_size": "draft.tensor_parallel_size",
    **{name: f"draft.{name}" for name in DraftSection.model_fields},
}
_SPEC_METHODS = {"draft_model": "standalone"}


def parse_speculative_config(text: str) -> dict[str, Any]:
    """The overrides that a --speculative-config JSON means.

    Raises: ConfigError: not a JSON object, or a key we do not have.
    """
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}; got '{text}'") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--speculative-config must be a JSON object, got '{text}'")
    overrides: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _SPEC_KEYS:
            raise ConfigError(f"--speculative-config: {unknown_key(key, _SPEC_KEYS)}")
        overrides[_SPEC_KEYS[key]] = value
    method = overrides.get("draft.method")
    if isinstance(method, str):
        overrides["draft.method"] = _SPEC_METHODS.get(method, method)
    return overrides


def unknown_key(key: str, known: Mapping[str, Any], where: str = "") -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(known)}"
    return f"unknown key '{key}'{' in ' + where if where else ''}; {hint}"
