"""A Batch built from tensors that are on the device already: no number of them is read back.

All rows have as many tokens, one behind the other in their row of `req_to_token`; how long a row is
may be known to the device alone, and the host to a bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.batch import AttentionRows, Batch
from paceline.worker.cache.req_to_token import ReqToToken
from paceline.worker.spec.future_rows import Rows, upload_ints


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The same number of new tokens for each row.

    Args:
        rows: who they are.
        starts: [bs] int64, the index in its row of each one's first new token.
        num_new: new tokens of each.
        max_starts: at least `starts`, on the host.
    """

    rows: Rows
    starts: Tensor
    num_new: int
    max_starts: Sequence[int]

    @property
    def bs(self) -> int:
        return len(self.rows.index_cpu)

    def slots(
        self, req_to_token: ReqToToken, kernels: KernelSet, *, may_overrun: bool = False
    ) -> Tensor:
        """[bs, num_new] int64; may_overrun: tokens behind what the row owns go to slot 0."""
        ends = self.starts + self.num_new
        flat = kernels.assign_extend_cache_locs(
            req_to_token.table, self.rows.index, self.starts, ends, self.bs * self.num_new
        )
        slots = flat.view(self.bs, self.num_new)
        owned_lens = tuple(req_to_token.owned_len(row) for row in self.rows.index_cpu)
        if may_overrun:
            places = self.starts[:, None] + torch.arange(self.num_new, device=flat.device)
            limits = upload_ints(owned_lens, flat.device)
            slots = slots.masked_fill(places >= limits[:, None], 0)
        elif flat.device.type == "cpu":  # elsewhere it would wait for the device
            for end, owned_len in zip(ends.tolist(), owned_lens, strict=True):
                assert end <= owned_len, "a token has no slot of its own"
        return slots


def device_batch(
    span: RowSpan,
    input_ids: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    req_to_token: ReqToToken,
    kernels: KernelSet,
    *,
    tree_mask: Tensor | None = None,
    logit_indices: Tensor | None = None,
) -> Batch:
    """The last tokens of `span`, as many of each row as there are ids, over all before them.

    Args:
        input_ids, positions, out_cache_loc: [bs, num_tokens] int64, num_tokens <= num_new.
        tree_mask: [bs, num_tokens, tree_len] bool, what each sees of the row's last tree_len
            tokens; None: all up to itself.
        logit_indices: [n] int64 of the flat tokens; None: all.
    """
    rows = _attention(span, input_ids.shape[1], tree_mask, req_to_token, kernels)
    is_decode = rows.qo_indptr is None
    return Batch(
        input_ids=input_ids.flatten(),
        positions=positions.flatten(),
        out_cache_loc=out_cache_loc.flatten(),
        decode=rows if is_decode else None,
        extend=None if is_decode else rows,
        logit_indices=logit_indices,
    )


def _attention(
    span: RowSpan,
    num_tokens: int,
    tree_mask: Tensor | None,
    req_to_token: ReqToToken,
    kernels: KernelSet,
) -> AttentionRows:
    """Rows of one token that sees all before it take the decode path, as in `build_batch`."""
    device, bs = span.starts.device, span.bs
    lens = (span.starts + span.num_new).int()
    kv_indptr = torch.zeros(bs + 1, dtype=torch.int32, device=device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=kv_indptr[1:])
    # On a CPU reading the lengths is free, and reference attention wants them exact.
    kv_lens = (
        lens.tolist()
        if device.type == "cpu"
        else [start + span.num_new for start in span.max_starts]
    )
    kv_indices = torch.empty(sum(kv_lens), dtype=torch.int32, device=device)
    kernels.create_kv_indices(
        req_to_token.table, span.rows.index, lens, kv_indptr, None, kv_indices
    )
    is_decode = num_tokens == 1 and tree_mask is None
    qo_indptr = None if is_decode else _evenly(bs, num_tokens, device)
    mask_indptr = None
    if tree_mask is not None:
        mask_indptr = _evenly(bs, tree_mask[0].numel(), device)
        tree_mask = tree_mask.flatten()
    return AttentionRows(
        start=0,
        stop=bs * num_tokens,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        tree_mask=tree_mask,
        mask_indptr=mask_indptr,
        plan=kernels.plan_attention(
            qo_indptr,
            kv_indptr,
            kv_indices,
            tree_mask,
            mask_indptr,
            q_lens=[num_tokens] * bs,
            kv_lens=kv_lens,
        ),
    )


def _evenly(bs: int, step: int, device: torch.device) -> Tensor:
    """0, step, 2 * step, ...: [bs + 1] int32."""
    return torch.arange(0, bs * step + 1, max(step, 1), dtype=torch.int32, device=device)
