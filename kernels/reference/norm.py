"""RMSNorm: the mean square in fp32, then the cast, then the weight, in that order."""

from torch import Tensor
from torch.nn.functional import rms_norm as _rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> [T, H].

    The weight multiplies what is already rounded to x's dtype, as Llama does: handing it to
    torch's op instead would change a quarter of the bf16 results in their last bit.
    """
    return _rms_norm(x, (x.shape[-1],), None, eps).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual); the sum is written into `residual`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
