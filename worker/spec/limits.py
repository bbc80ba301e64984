"""What a SpecConfig may ask for. Pure."""

from paceline.worker.config import SpecConfig
from paceline.worker.errors import ConfigError

MAX_NUM_STEPS = 64
MAX_TOPK = 32
MAX_DRAFT_TOKENS = 1024  # nodes of one tree: what a verify kernel walks with one thread block


def check_spec_config(spec: SpecConfig) -> None:
    """Raises: ConfigError: a value is outside its bounds, or the tree asked for can have no more
    nodes than `1 + topk + (num_steps - 1) * topk^2`, which for one branch is `num_steps + 1`.
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


def max_tree_nodes(num_steps: int, topk: int) -> int:
    """Nodes that growth can offer: the root, topk below it, then topk for each of topk lanes."""
    return 1 + topk + (num_steps - 1) * topk * topk


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be in {low}..{high}")
