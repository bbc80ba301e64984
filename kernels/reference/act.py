"""The gated activation of Llama's feed-forward."""

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 * I] (gate, then up) -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return silu(gate).mul_(up)
