"""Batches built from tensors that are on the device already: no number of them is read back.

A step looks its rows up once: positions, slots and keys of all its forwards. How long a row is may
be known to the device alone, and the host to a bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import AttentionRows, Batch
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.spec.future_rows import Rows, upload_ints


class Span(NamedTuple):
    """The tokens that a forward computes of each row: places begin..end behind its seq_len."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, and what its forwards read and write of them.

    A forward's tokens see all of their row up to its last one, or what a tree mask leaves.

    positions: [bs, n] int64, of places 0..n-1 behind each row's seq_len.
    slots: [bs, m] int64, of places 0..m-1.
    """

    rows: Rows
    spans: Sequence[Span]
    positions: Tensor
    slots: Tensor
    _kv_indptr: Tensor  # of all forwards, one behind the other
    _kv_indices: Tensor
    _kv_lens: Sequence[Sequence[int]]  # on the host, or bounds
    _kernels: KernelSet

    @classmethod
    def look_up(
        cls,
        rows: Rows,
        seq_lens: Tensor,
        spans: Sequence[Span],
        req_to_token: ReqToToken,
        kernels: KernelSet,
        *,
        num_positions: int,
        max_len: int,
        may_overrun: bool = False,
    ) -> "StepRows":
        """
        Args:
            seq_lens: [bs] int64.
            spans: of the forwards, in order.
            num_positions: places whose positions are wanted at least.
            max_len: at least the rows' lengths at the end of each forward, on the host.
            may_overrun: tokens behind what a row owns go to slot 0.
        """
        device, bs = seq_lens.device, rows.bs
        width = max(span.end for span in spans)
        positions = seq_lens[:, None] + evenly(max(width, num_positions), 1, torch.int64, device)
        places = positions[:, :width]
        slots = req_to_token.table[rows.index[:, None], places].long()
        if may_overrun:
            slots = slots.masked_fill(places >= rows.owned_lens[:, None], 0)
        elif device.type == "cpu":  # elsewhere it would wait for the device
            is_owned = places[:, -1] < rows.owned_lens
            assert bool((is_owned | (rows.index == 0)).all()), "a token has no slot of its own"
        lens = (seq_lens + _ends_of(tuple(spans), device)).flatten().int()  # [forwards * bs]
        kv_indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
        torch.cumsum(lens, 0, dtype=torch.int32, out=kv_indptr[1:])
        kv_lens = [[max_len] * bs] * len(spans)
        if device.type == "cpu":  # where reading is free, and reference attention wants them exact
            kv_lens = lens.view(len(spans), bs).tolist()
        kv_indices = torch.empty(sum(map(sum, kv_lens)), dtype=torch.int32, device=device)
        kernels.create_kv_indices(
            req_to_token.table, rows.index.repeat(len(spans)), lens, kv_indptr, None, kv_indices
        )
        return cls(rows, spans, positions, slots, kv_indptr, kv_indices, kv_lens, kernels)

    def batch(
        self,
        forward: int,
        input_ids: Tensor,
        positions: Tensor,
        *,
        tree_mask: Tensor | None = None,
        logit_indices: Tensor | None = None,
    ) -> Batch:
        """The tokens of a forward, by its number.

        Args:
            input_ids, positions: as many int64 as tokens, row by row, in any shape.
            tree_mask: [bs, num_tokens, tree_len] bool, what each sees of the row's last tree_len
                tokens; None: all up to itself.
            logit_indices: [n] int64 of the flat tokens; None: all.
        """
        span = self.spans[forward]
        rows = self._attention(forward, tree_mask)
        is_decode = rows.qo_indptr is None
        return Batch(
            input_ids=flat(input_ids),
            positions=flat(positions),
            out_cache_loc=flat(self.slots[:, span.begin : span.end]),
            decode=rows if is_decode else None,
            extend=None if is_decode else rows,
            logit_indices=logit_indices,
        )

    def _attention(self, forward: int, tree_mask: Tensor | None) -> AttentionRows:
        """Rows of one token that sees all before it take the decode path, as in `build_batch`."""
        device, bs = self.slots.device, self.rows.bs
        span = self.spans[forward]
        num_tokens = span.end - span.begin
        is_decode = num_tokens == 1 and tree_mask is None
        kv_indptr = self._kv_indptr[forward * bs : (forward + 1) * bs + 1]
        qo_indptr = None if is_decode else evenly(bs + 1, num_tokens, torch.int32, device)
        mask_indptr = None
        if tree_mask is not None:
            mask_indptr = evenly(bs + 1, tree_mask[0].numel(), torch.int32, device)
            tree_mask = tree_mask.flatten()
        return AttentionRows(
            start=0,
            stop=bs * num_tokens,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=self._kv_indices,
            tree_mask=tree_mask,
            mask_indptr=mask_indptr,
            plan=self._kernels.plan_attention(
                qo_indptr,
                kv_indptr,
                self._kv_indices,
                tree_mask,
                mask_indptr,
                q_lens=[num_tokens] * bs,
                kv_lens=self._kv_lens[forward],
            ),
        )


def flat(x: Tensor) -> Tensor:
    """x in one dimension and dense, which a flattened column is not: kernels read it so."""
    return x.flatten().contiguous()


# What is equal in every step is made once: on a GPU each of these would be a launch. None may be
# written to. There are as many as sizes of batches and of trees.


@cache
def evenly(num: int, step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0, step, 2 * step, ...: [num]."""
    return torch.arange(num, dtype=dtype, device=device) * step


@cache
def _ends_of(spans: tuple[Span, ...], device: torch.device) -> Tensor:
    """[num spans, 1] int64."""
    return upload_ints(tuple(span.end for span in spans), device)[:, None]
