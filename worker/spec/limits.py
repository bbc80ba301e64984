"""What a SpecConfig may ask for, and the room it needs. Pure."""

import logging
from dataclasses import replace

from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError

log = logging.getLogger(__name__)

MAX_NUM_STEPS = 64
MAX_TOPK = 32
MAX_DRAFT_TOKENS = 1024  # nodes of one tree: what a verify kernel walks with one thread block


def check_spec_config(spec: SpecConfig) -> None:
    """Raises: ConfigError: a value is outside its bounds, two options contradict each other, or the
    tree asked for can have no more nodes than `1 + topk + (num_steps - 1) * topk^2`, which for one
    branch is `num_steps + 1`.
    """
    if spec.method == "none":
        return
    _check_range("num_steps", spec.num_steps, 1, MAX_NUM_STEPS)
    _check_range("topk", spec.topk, 1, MAX_TOPK)
    _check_range("num_draft_tokens", spec.num_draft_tokens, 2, MAX_DRAFT_TOKENS)
    most = max_tree_nodes(spec.num_steps, spec.topk)
    if spec.num_draft_tokens > most:
        raise ConfigError(
            f"num_draft_tokens is {spec.num_draft_tokens}, but a tree of num_steps="
            f"{spec.num_steps} and topk={spec.topk} has {most} nodes at most, root included; "
            "lower num_draft_tokens or raise num_steps or topk"
        )
    if not 0.0 < spec.draft_timeout_s < float("inf"):
        raise ConfigError(
            f"the draft's timeout is {spec.draft_timeout_s:g} s; it must be finite and above 0"
        )
    _check_draft(spec)
    _check_rule(spec)
    _check_simulation(spec)


def settle_spec_config(spec: SpecConfig) -> SpecConfig:
    """One branch is a chain, and a chain has its root and one node per depth: a smaller or larger
    num_draft_tokens is set right, with a warning.

    Raises: ConfigError: as `check_spec_config`.
    """
    settled = as_chain(spec)
    check_spec_config(settled)
    if settled != spec:
        log.warning(
            "num_draft_tokens=%d was set to %d: with topk=1 a tree of num_steps=%d is a chain",
            spec.num_draft_tokens,
            settled.num_draft_tokens,
            spec.num_steps,
        )
    return settled


def as_chain(spec: SpecConfig) -> SpecConfig:
    """The same with as many nodes as a chain has, where `topk` makes it one."""
    if spec.method == "none" or spec.topk != 1:
        return spec
    return replace(spec, num_draft_tokens=spec.num_steps + 1)


def max_tree_nodes(num_steps: int, topk: int) -> int:
    """Nodes that growth can offer: the root, topk below it, then topk for each of topk lanes."""
    return 1 + topk + (num_steps - 1) * topk * topk


def alloc_len_per_decode(spec: SpecConfig) -> int:
    """Slots that one step of a req writes behind its prefix at most: a draft's, or a verify's."""
    return max(spec.topk * spec.num_steps, spec.num_draft_tokens)


def reserve_len(spec: SpecConfig, overlap: bool) -> int:
    """Slots that a decoding req owns behind what the host knows to be committed.

    Where steps overlap, the one in flight may have committed as many as it could write. A draft
    that is a model of its own reads the last new token in the same step, one place further.
    """
    if not spec.is_colocated:
        return 0
    return alloc_len_per_decode(spec) * (2 if overlap else 1) + (spec.method == "standalone")


def is_overlapped(spec: SpecConfig, device: str) -> bool:
    """Whether a step is launched before the last one is read, on a rank of this device."""
    if not spec.is_colocated:
        return False
    if spec.overlap == "auto":
        return device.startswith("cuda")
    return spec.overlap == "on"


def _check_draft(spec: SpecConfig) -> None:
    if spec.token_map and spec.method != "eagle":
        raise ConfigError(
            f"token_map is '{spec.token_map}', but method is '{spec.method}'; only EAGLE-1 and -2 "
            "heads take one, an EAGLE-3 head brings its own"
        )
    if spec.ngram_corpus and (spec.is_colocated or spec.method not in ("ngram", "standalone")):
        raise ConfigError(
            f"ngram_corpus is '{spec.ngram_corpus}', but method '{spec.method}' makes no n-gram "
            "guesses; use method 'ngram', or a decoupled draft with fallback 'ngram'"
        )
    if spec.overlap == "on" and not spec.is_colocated:
        raise ConfigError(
            f"overlap is 'on', but method '{spec.method}' makes its drafts on the host; use a "
            "head, or a standalone draft with placement 'colocated', or overlap 'auto'"
        )


def _check_rule(spec: SpecConfig) -> None:
    for name, value in (
        ("threshold_single", spec.threshold_single),
        ("threshold_acc", spec.threshold_acc),
    ):
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{name} is {value:g}; it must be in 0..1, where 1 is exact")
        if value != 1.0 and spec.rule != "rejection":
            raise ConfigError(
                f"{name} is {value:g}, but rule '{spec.rule}' knows no threshold; use rule "
                "'rejection', or leave the threshold at 1"
            )


def _check_simulation(spec: SpecConfig) -> None:
    if spec.simulated_accept_length == 0.0:
        return
    if not 1.0 <= spec.simulated_accept_length <= spec.num_steps + 1:
        raise ConfigError(
            f"simulated_accept_length is {spec.simulated_accept_length:g}; it must be in "
            f"1..{spec.num_steps + 1}, num_steps and the bonus token, or 0 for none"
        )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be in {low}..{high}")
