"""Choices over whole vocabularies and batches at once, for logits on a GPU; nothing waits for it.

Chooses what worker/sampler.py chooses row by row on the host; a test holds the two equal. Logits
come adjusted (worker/logit_filters.py); here they are scaled, cut and drawn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.api import KernelSet
from paceline.worker.logit_filters import MIN_TEMPERATURE, TOP_P_TOLERANCE, LogitRow
from paceline.worker.noise import device_noise_keys, gumbel, signed_seed
from paceline.worker.step import SamplingParams

# Logits that are transformed at once: a few of their fp64 and int64 companions must find room.
_MAX_CELLS = 1 << 24
# In place of a token: the row's greatest logit is not finite, so no token can be chosen from it.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class DenseParams:
    """How each row of logits is drawn from; tensors [n] on the device of the logits.

    temperature, top_p, min_p: fp32; top_k, seeds, positions: int64, a seed's 64 bits as they are.
    Greedy rows have temperature 1 and no cuts.
    is_sorted: some row is cut by top_k or top_p.
    """

    is_greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    is_sorted: bool

    def part(self, rows: slice) -> "DenseParams":
        """Of some of the rows."""
        return DenseParams(
            self.is_greedy[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.positions[rows],
            self.is_sorted,
        )

    @classmethod
    def of_rows(cls, rows: Sequence[LogitRow], device: torch.device) -> "DenseParams":
        params = [row.params for row in rows]
        floats = [distribution_floats(p) for p in params]
        ints = [
            (p.is_greedy, kept_top_k(p), signed_seed(p.seed), row.position)
            for p, row in zip(params, rows, strict=True)
        ]
        by_float = torch.tensor(floats, dtype=torch.float32).view(-1, 3).to(device).unbind(1)
        by_int = torch.tensor(ints, dtype=torch.int64).view(-1, 4).to(device).unbind(1)
        return cls(
            is_greedy=by_int[0].bool(),
            temperature=by_float[0],
            top_k=by_int[1],
            top_p=by_float[1],
            min_p=by_float[2],
            seeds=by_int[2],
            positions=by_int[3],
            is_sorted=any(is_sorted(p) for p in params),
        )

    @classmethod
    def unless_greedy(cls, rows: Sequence[LogitRow], device: torch.device) -> "DenseParams | None":
        """None where no row is drawn by chance: then nothing of them need reach the device."""
        return None if all(row.params.is_greedy for row in rows) else cls.of_rows(rows, device)


def distribution_floats(params: SamplingParams) -> tuple[float, float, float]:
    """(temperature, top_p, min_p) as `DenseParams` wants them."""
    if params.is_greedy:
        return 1.0, 1.0, 0.0
    return max(params.temperature, MIN_TEMPERATURE), params.top_p, params.min_p


def kept_top_k(params: SamplingParams) -> int:
    """How many tokens top_k keeps, which may be more than there are."""
    return params.top_k if params.top_k > 0 and not params.is_greedy else 2**31 - 1


def is_sorted(params: SamplingParams) -> bool:
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0)


def choose_dense(kernels: KernelSet, logits: Tensor, params: DenseParams | None) -> Tensor:
    """The token of each row by the coupled rule, or NO_TOKEN: [n] int64.

    logits: [n, vocab_size] fp32, adjusted already; NaN counts as -inf.
    params: None where all rows are greedy.
    """
    pieces = _pieces(logits)
    if len(pieces) == 1:
        return _choose(kernels, logits, params)
    return torch.cat([_choose(kernels, logits[i], _part(params, i)) for i in pieces])


def _choose(kernels: KernelSet, logits: Tensor, params: DenseParams | None) -> Tensor:
    logits = without_nan(logits)
    best, ids = logits.max(-1)
    if params is not None:
        ids = perturb(kernels, log_weights(logits, params), params).argmax(-1)
    return ids.masked_fill(best.isinf(), NO_TOKEN)


def target_probs_dense(logits: Tensor, params: DenseParams | None) -> tuple[Tensor, Tensor]:
    """(the distribution that each row is drawn from [n, vocab_size] fp32, whether there is none
    [n]); a greedy row's is all on its argmax, that of a row without a finite maximum is 0.

    logits, params: as for `choose_dense`.
    """
    pieces = [_target_probs(logits[i], _part(params, i)) for i in _pieces(logits)]
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat([probs for probs, _ in pieces]), torch.cat([none for _, none in pieces])


def _target_probs(logits: Tensor, params: DenseParams | None) -> tuple[Tensor, Tensor]:
    logits = without_nan(logits)
    best, ids = logits.max(-1, keepdim=True)
    is_unusable = best.isinf()
    probs = torch.zeros_like(logits).scatter_(-1, ids, 1.0)
    if params is not None:
        drawn = log_weights(logits, params).softmax(-1)
        probs = torch.where(params.is_greedy.unsqueeze(-1), probs, drawn)
    return probs.masked_fill_(is_unusable, 0.0), is_unusable.squeeze(-1)


def rank_dense(
    kernels: KernelSet,
    logits: Tensor,
    params: DenseParams | None,
    topk: int,
    *,
    token_ids: Tensor | None = None,
    is_coupled: bool = True,
) -> tuple[Tensor, Tensor]:
    """What `Sampler.top_children` returns, on the device; logits [n, V] fp32.

    An only child has no rival, and no sum over a vocabulary is made for it: where topk is 1, any
    number above -inf stands for its probability.

    params: None where all rows are greedy.
    token_ids: [V] int64, the tokens behind the columns; None: their numbers.
    is_coupled: whether tokens rank by their perturbed score.
    """
    scores = logits.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf)
    if params is not None:
        scores = log_weights(scores, params)
        if is_coupled:
            scores = perturb(kernels, scores, params, token_ids)
    if topk == 1:
        return scores.max(-1, keepdim=True)
    best, ids = scores.topk(min(topk, scores.shape[1]))
    probs = (best - scores.logsumexp(-1, keepdim=True)).exp()
    is_missing = best == -torch.inf
    probs, ids = probs.masked_fill(is_missing, -torch.inf), ids.masked_fill(is_missing, 0)
    num_lacking = topk - ids.shape[1]  # of a draft with few tokens
    if num_lacking == 0:
        return probs, ids
    return pad(probs, (0, num_lacking), value=-torch.inf), pad(ids, (0, num_lacking))


def _pieces(logits: Tensor) -> list[slice]:
    """The rows in runs of at most _MAX_CELLS logits; one run, which is empty, of no rows."""
    num_rows, num_columns = logits.shape
    step = max(_MAX_CELLS // num_columns, 1)
    return [slice(i, i + step) for i in range(0, max(num_rows, 1), step)]


def _part(params: DenseParams | None, rows: slice) -> DenseParams | None:
    return None if params is None else params.part(rows)


def without_nan(logits: Tensor) -> Tensor:
    """-inf for NaN."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def log_weights(logits: Tensor, params: DenseParams) -> Tensor:
    """Log-probabilities up to a constant after all cuts, 0 at the best: [n, V]. All -inf where
    logits [n, V], which hold no NaN, have no finite maximum."""
    best = logits.amax(-1, keepdim=True)
    z = (logits - best) / params.temperature.unsqueeze(-1)
    return cut_dense(z, params).masked_fill(~best.isfinite(), -torch.inf)


def perturb(
    kernels: KernelSet, z: Tensor, params: DenseParams, token_ids: Tensor | None = None
) -> Tensor:
    """z [n, V] plus the noise of each token; greedy rows as they are."""
    keys = device_noise_keys(params.seeds, params.positions)
    if token_ids is None:
        token_ids = torch.arange(z.shape[1], device=z.device)
    noise = gumbel(kernels.noise_bits(keys, token_ids.expand(z.shape)))
    return z + noise.masked_fill(params.is_greedy.unsqueeze(-1), 0.0)


def cut_dense(z: Tensor, params: DenseParams) -> Tensor:
    """-inf for the tokens that top_k, top_p and min_p of each row exclude; 0 is each row's best."""
    threshold = params.min_p.log().clamp(max=0.0).unsqueeze(-1)  # [n, 1]; -inf where min_p is 0
    if params.is_sorted:
        ordered = z.sort(-1, descending=True).values
        rank = params.top_k.clamp(max=z.shape[1]).unsqueeze(-1) - 1  # [n, 1]
        kth = ordered.gather(-1, rank)
        threshold = torch.maximum(threshold, kth)
        mass = ordered.masked_fill(ordered < kth, -torch.inf).exp().cumsum(-1, dtype=torch.float64)
        top_p = params.top_p.double().unsqueeze(-1)
        wanted = (top_p - TOP_P_TOLERANCE) * mass[:, -1:]
        boundary = (mass < wanted).sum(-1, keepdim=True)
        level = ordered.gather(-1, boundary)
        threshold = torch.where(top_p < 1.0, torch.maximum(threshold, level), threshold)
    return z.masked_fill(z < threshold, -torch.inf)
