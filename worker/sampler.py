"""Sampler: rows of logits → tokens, by the `coupled` rule.

The token at a position is `argmax(z + noise)` over the log-probabilities z that remain after all
transforms, the noise being a function of (seed, position, token id): see worker/noise.py. Greedy
is the case without noise. The sampler knows reqs, not steps or trees.

Order of the transforms: repetition, presence and frequency penalties, min_tokens, logit_bias,
temperature, top_k, top_p, min_p. Ties go to the lowest id.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.config import SpecConfig
from paceline.worker.dense_sampler import (
    NO_TOKEN,
    DenseParams,
    choose_dense,
    rank_dense,
    target_probs_dense,
)
from paceline.worker.errors import InternalError
from paceline.worker.logit_filters import LogitRow, adjust, cut, scale
from paceline.worker.logit_stages import apply_mask
from paceline.worker.noise import Floats, Ids, noise_key, top_perturbed

__all__ = ["NO_TOKEN", "LogitRow", "Sampler", "SamplerStats"]

_NUM_RIVALS = 8
_COUPLED = SpecConfig()


@dataclass(slots=True)
class SamplerStats:
    """Running totals, for benchmarks: `noise_s` over the steps' time is the ratio `noise_share`."""

    num_rows: int = 0
    num_noisy_rows: int = 0
    choose_s: float = 0.0  # all of `choose`
    noise_s: float = 0.0  # of that, the noise and the choice among the tokens it may lift


class Sampler:
    """Chooses tokens: on the host row by row, on a GPU all rows at once.

    Not thread-safe: it belongs to the device thread.
    """

    def __init__(
        self,
        kernels: KernelSet,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        spec: SpecConfig = _COUPLED,
    ) -> None:
        """`eos_token_ids` cannot be chosen before a req's `min_tokens` are reached; `spec` says by
        which rule trees are verified."""
        self.spec = spec
        self._kernels = kernels
        self.vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self.stats = SamplerStats()

    def choose(
        self, logits: Tensor, rows: Sequence[LogitRow], mask: Tensor | None = None
    ) -> Tensor:
        """The token of each row, or NO_TOKEN: [n] int64, on the device of the logits.

        A row whose greatest logit is not finite, as after an overflow, has no token; the others
        have theirs all the same.

        Args:
            logits: [n, V] fp32, V >= vocab_size; columns behind the vocabulary are padding. NaN
                counts as -inf. Not changed.
            rows: the req and the place behind each row.
            mask: [n, ceil(vocab_size / 32)] int32, see `apply_mask`.
        Raises: InternalError: the rows of logits are not as many as the reqs.
        """
        started_s = time.perf_counter()
        logits = self.adjusted(logits, rows, mask)
        noisy = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if logits.device.type == "cpu":
            logits, chosen, unusable = _argmax(logits)
            noisy = [i for i in noisy if i not in unusable]
            for i in noisy:
                chosen[i] = self._draw(logits[i], rows[i])
        else:
            params = DenseParams.unless_greedy(rows, logits.device)
            chosen = choose_dense(self._kernels, logits, params)
        self.stats.num_rows += len(rows)
        self.stats.num_noisy_rows += len(noisy)
        self.stats.choose_s += time.perf_counter() - started_s
        return chosen

    def adjusted(
        self, logits: Tensor, rows: Sequence[LogitRow], mask: Tensor | None = None
    ) -> Tensor:
        """The logits that tokens are chosen from, [n, vocab_size] fp32; arguments as of `choose`.

        Through stage 3 of worker/logit_stages.py: penalties, min_tokens, logit_bias, mask.
        """
        if logits.shape[0] != len(rows):
            raise InternalError(f"{logits.shape[0]} rows of logits for {len(rows)} reqs")
        logits = logits.detach()[:, : self.vocab_size]
        adjusted = [i for i, row in enumerate(rows) if row.has_adjustments]
        if adjusted:
            logits = logits.clone()
            for i in adjusted:
                adjust(logits[i], rows[i], self._eos_token_ids)
        return apply_mask(logits, mask)

    def target_probs(
        self, logits: Tensor, rows: Sequence[LogitRow], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(the distribution of each row's token [n, vocab_size] fp32, whether it has none [n]).

        A greedy row's is all on its argmax, that of a row without a token is 0. Arguments as of
        `choose`.
        """
        logits = self.adjusted(logits, rows, mask)
        if logits.device.type != "cpu":
            return target_probs_dense(logits, DenseParams.unless_greedy(rows, logits.device))
        logits, chosen, unusable = _argmax(logits)
        probs = torch.zeros_like(logits)
        for i, row in enumerate(rows):
            if i in unusable:
                continue
            if row.params.is_greedy:
                probs[i, chosen[i]] = 1.0
            else:
                weights = np.exp(cut(scale(logits[i].numpy(), row.params.temperature), row.params))
                probs[i] = torch.from_numpy(weights / weights.sum())
        return probs, chosen == NO_TOKEN

    def top_children(
        self,
        logits: Tensor,
        rows: Sequence[LogitRow],
        topk: int,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The `topk` likeliest tokens of each row, best first, for a draft that grows a tree.

        Likely to be what the target chooses: where a req samples by the coupled rule, tokens rank
        by their perturbed score, since the target will meet the same noise, and probabilities are
        the softmax of these scores. By rejection they rank by their probability. top_k, top_p and
        min_p apply; penalties, min_tokens and logit_bias are the target's.

        Args:
            logits: [n, V], of any dtype; NaN and +inf count as -inf.
            token_ids: [V] int64, the target's tokens behind the columns, which their noise goes
                by; None: their numbers, of which those from vocab_size on are padding.
        Returns: (probabilities [n, topk] fp32, columns [n, topk] int64) on the host; where a row
            has fewer than topk tokens to offer, probability -inf and column 0. Of logits on a GPU
            an only child's probability is not worked out, and 1 stands for it.
        """
        num_columns = self.vocab_size if token_ids is None else len(token_ids)
        logits = logits.detach()[:, :num_columns].float()
        is_coupled = self.spec.rule == "coupled"
        if logits.device.type != "cpu":
            best, columns = rank_dense(
                self._kernels,
                logits,
                DenseParams.unless_greedy(rows, logits.device),
                topk,
                token_ids=token_ids,
                is_coupled=is_coupled,
            )
            probs = best.cpu()
            if topk == 1:
                probs = torch.where(probs > -torch.inf, 1.0, -torch.inf)
            return probs, columns.cpu()
        logits = logits.masked_fill(~logits.isfinite(), -torch.inf)
        names = None if token_ids is None else token_ids.numpy()
        probs = torch.full((len(rows), topk), -torch.inf)
        ids = torch.zeros((len(rows), topk), dtype=torch.int64)
        for i, row in enumerate(rows):
            row_probs, row_ids = _rank(logits[i].numpy(), row, topk, names, is_coupled=is_coupled)
            probs[i, : len(row_ids)] = torch.from_numpy(row_probs)
            ids[i, : len(row_ids)] = torch.from_numpy(row_ids)
        return probs, ids

    def _draw(self, logits: Tensor, row: LogitRow) -> int:
        z = cut(scale(logits.numpy(), row.params.temperature), row.params)
        started_s = time.perf_counter()
        token_ids, _ = top_perturbed(z, noise_key(row.params.seed, row.position), 1)
        self.stats.noise_s += time.perf_counter() - started_s
        return int(token_ids[0])


def _rank(
    logits: Floats, row: LogitRow, topk: int, token_ids: Ids | None, *, is_coupled: bool
) -> tuple[Floats, Ids]:
    """(probabilities, columns) of at most topk children; logits [V] without NaN and +inf."""
    if not np.isfinite(logits.max()):
        return logits[:0], np.empty(0, dtype=np.int64)
    params = row.params
    if params.is_greedy or not is_coupled:
        z = scale(logits, 1.0 if params.is_greedy else params.temperature)
        if not params.is_greedy:
            z = cut(z, params)
        ids = _best_of(z, min(topk, int(np.count_nonzero(z > -np.inf))))
        return np.exp(z[ids]) / np.exp(z).sum(), ids
    z = cut(scale(logits, params.temperature), params)
    # The probabilities compare children of different parents only, for which it is enough to
    # sum over the best few: the noise of a whole vocabulary would cost more than a draft step.
    num_summed = min(topk + _NUM_RIVALS, int(np.count_nonzero(z > -np.inf)))
    ids, sums = top_perturbed(z, noise_key(params.seed, row.position), num_summed, token_ids)
    weights = np.exp(sums - sums[0])
    return (weights / weights.sum())[:topk], ids[:topk]


def _best_of(z: Floats, k: int) -> Ids:
    """The k greatest by (value descending, id ascending)."""
    ids = np.flatnonzero(z >= np.partition(z, len(z) - k)[len(z) - k])
    return ids[np.lexsort((ids, -z[ids]))[:k]]


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor, frozenset[int]]:
    """The logits [n, V] without NaN, the lowest id of each row's greatest, [n] int64, and the rows
    whose greatest is not finite, which have NO_TOKEN."""
    if logits.shape[0] == 0:
        return logits, torch.empty(0, dtype=torch.int64, device=logits.device), frozenset()
    for attempt in range(2):
        # numpy's argmax takes 2 us for 49152 logits where torch's takes 60; NaN wins in both.
        if logits.device.type == "cpu":
            chosen = torch.from_numpy(logits.numpy().argmax(-1))
        else:
            chosen = logits.argmax(-1)
        best = logits.gather(-1, chosen.unsqueeze(-1))
        if bool(best.isfinite().all()):
            return logits, chosen, frozenset()
        if attempt == 0:
            logits = logits.masked_fill(logits.isnan(), -torch.inf)
    is_unusable = ~best.isfinite().squeeze(-1)
    unusable = frozenset(is_unusable.nonzero().flatten().tolist())
    return logits, chosen.masked_fill(is_unusable, NO_TOKEN), unusable
