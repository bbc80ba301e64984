"""The `coupled` choice over whole vocabularies and batches at once, for logits on a GPU.

Chooses what worker/sampler.py chooses row by row on the host; a test holds the two equal.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.logit_filters import MIN_TEMPERATURE, TOP_P_TOLERANCE, LogitRow
from paceline.worker.noise import gumbel, noise_key


def choose_dense(kernels: KernelSet, logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """logits [n, vocab_size] fp32, adjusted already, no NaN and a finite best -> tokens [n] int64.

    Every row has a temperature above 0.
    """
    return _perturb(kernels, logits, rows).argmax(-1)


def rank_dense(
    kernels: KernelSet, logits: Tensor, rows: Sequence[LogitRow], topk: int
) -> tuple[Tensor, Tensor]:
    """What `Sampler.top_children` returns, from logits [n, vocab_size] fp32 without NaN or +inf."""
    scores = logits.clone()
    noisy = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if noisy:
        perturbed = _perturb(kernels, logits[noisy], [rows[i] for i in noisy])
        scores[noisy] = perturbed.masked_fill(perturbed.isnan(), -torch.inf)
    best, ids = scores.topk(topk)
    probs = (best - scores.logsumexp(-1, keepdim=True)).exp()
    is_missing = best == -torch.inf
    return probs.masked_fill(is_missing, -torch.inf).cpu(), ids.masked_fill(is_missing, 0).cpu()


def _perturb(kernels: KernelSet, logits: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """Log-probabilities up to a constant after all cuts, plus noise: [n, vocab_size]."""
    device = logits.device
    temperature = _column([max(row.params.temperature, MIN_TEMPERATURE) for row in rows], device)
    z = cut_dense((logits - logits.amax(-1, keepdim=True)) / temperature, rows)
    keys = torch.tensor(
        [noise_key(row.params.seed, row.position) for row in rows], dtype=torch.int64, device=device
    )
    token_ids = torch.arange(z.shape[1], device=device).expand(z.shape)
    return z + gumbel(kernels.noise_bits(keys, token_ids))


def cut_dense(z: Tensor, rows: Sequence[LogitRow]) -> Tensor:
    """-inf for the tokens that top_k, top_p and min_p of each row exclude; 0 is each row's best."""
    vocab_size = z.shape[1]
    params = [row.params for row in rows]
    min_p = _column([p.min_p for p in params], z.device)
    threshold = min_p.log().clamp_(max=0.0)  # [n, 1]; -inf where min_p is 0
    if any(0 < p.top_k < vocab_size or p.top_p < 1.0 for p in params):
        ordered = z.sort(-1, descending=True).values
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        rank = torch.tensor(top_k, device=z.device).unsqueeze(-1) - 1  # [n, 1]
        kth = ordered.gather(-1, rank)
        threshold = torch.maximum(threshold, kth)
        mass = ordered.masked_fill(ordered < kth, -torch.inf).exp().cumsum(-1, dtype=torch.float64)
        top_p = _column([p.top_p for p in params], z.device).double()
        wanted = (top_p - TOP_P_TOLERANCE) * mass[:, -1:]
        boundary = (mass < wanted).sum(-1, keepdim=True)
        level = ordered.gather(-1, boundary)
        threshold = torch.where(top_p < 1.0, torch.maximum(threshold, level), threshold)
    return z.masked_fill(z < threshold, -torch.inf)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(-1)
