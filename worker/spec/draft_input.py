"""EagleDraftInput: what a draft step starts from, one row per req that keeps its identity. Pure.

Left out, as nothing here has a use for them: multipliers that pad data-parallel batches (there is
no data parallelism inside a group), a class-wide allocation length (it belongs to a configuration)
and indices of a ring of futures (what a step leaves for the next is kept by `req_pool_indices`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from paceline.worker.spec.spec_info import CaptureHiddenMode


class DeviceEvent(Protocol):
    """A point in a device's queue, as torch.cuda.Event."""

    def synchronize(self) -> None: ...


_ROW_TENSORS = (
    "req_pool_indices",
    "topk_p",
    "topk_index",
    "accept_length",
    "allocate_lens",
    "new_seq_lens",
)
_ROW_TUPLES = ("req_pool_indices_cpu", "accept_length_cpu", "extend_lens_cpu")
_TOKEN_TENSORS = ("verified_id", "hidden_states")
_EXTEND_TENSORS = ("req_pool_indices_for_draft_extend", "seq_lens_for_draft_extend")
_EXTEND_TUPLES = ("req_pool_indices_for_draft_extend_cpu", "seq_lens_for_draft_extend_cpu")


@dataclass(frozen=True, slots=True, eq=False)
class EagleDraftInput:
    """What a draft step starts from: one row per req, in the order of `req_pool_indices`.

    The overlapped path plans with rows whose candidates are still being computed: `verified_id`,
    `topk_*` and `hidden_states` are None there, and looked up by `req_pool_indices` when the step
    runs. Both paths filter and merge alike: every field that is set follows its req.

    While a draft extend is due (`extend_lens_cpu` set), `verified_id` and `hidden_states` hold
    all its tokens, flat over reqs; else one row per req.

    Args:
        req_pool_indices, req_pool_indices_cpu: [bs] int64, who the rows are; the same on the host.
        verified_id: [bs] int64, the token at position seq_len, root of the next tree.
        topk_p, topk_index: [bs, topk] fp32 and int64, candidates behind it, in draft vocabulary.
        hidden_states: [bs, hidden_size], what the next draft forward starts from.
        capture_hidden_mode: what the forward about to run hands back.
        accept_length, accept_length_cpu: [bs] int32, drafts accepted last, bonus not counted.
        extend_lens_cpu: tokens of each req in the draft extend that is due, 0 for none.
        positions: int64, of the forward's tokens (the same number for each req outside an extend),
            where they are not those of the batch.
        kv_indptr, kv_indices: int32 [bs * topk + 1] and int64, of one draft forward. They point
            into each other across reqs, so that filter and merge drop them, to be built again.
        req_pool_indices_for_draft_extend, seq_lens_for_draft_extend: those that a draft extend is
            due for, a part of the rows; each with its twin on the host.
        allocate_lens: [bs] int64, tokens whose slots each req owns.
        new_seq_lens: [bs] int64, seq_lens behind the last verification.
        verify_done: reached when all verifications that the rows come from have chosen.
    Raises: ValueError: a field has not one entry for each row.
    """

    req_pool_indices: Tensor
    req_pool_indices_cpu: tuple[int, ...]
    verified_id: Tensor | None = None
    topk_p: Tensor | None = None
    topk_index: Tensor | None = None
    hidden_states: Tensor | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.FULL
    accept_length: Tensor | None = None
    accept_length_cpu: tuple[int, ...] | None = None
    extend_lens_cpu: tuple[int, ...] | None = None
    positions: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    req_pool_indices_for_draft_extend: Tensor | None = None
    req_pool_indices_for_draft_extend_cpu: tuple[int, ...] | None = None
    seq_lens_for_draft_extend: Tensor | None = None
    seq_lens_for_draft_extend_cpu: tuple[int, ...] | None = None
    allocate_lens: Tensor | None = None
    new_seq_lens: Tensor | None = None
    verify_done: tuple[DeviceEvent, ...] = ()

    def __post_init__(self) -> None:
        rows = self.req_pool_indices_cpu
        if len(set(rows)) != len(rows):
            raise ValueError(f"rows {rows} name a req twice")
        for name in (*_ROW_TENSORS, *_ROW_TUPLES):
            self._check_len(name, len(rows))
        num_tokens = len(rows) if self.extend_lens_cpu is None else sum(self.extend_lens_cpu)
        for name in _TOKEN_TENSORS:
            self._check_len(name, num_tokens)
        if self.positions is not None:
            self._check_len("positions", sum(self._num_positions()))
        extended = self.req_pool_indices_for_draft_extend_cpu
        if extended is not None and not set(extended) <= set(rows):
            raise ValueError(f"a draft extend of rows {extended} is not one of rows {rows}")
        for name in (*_EXTEND_TENSORS, *_EXTEND_TUPLES):
            self._check_len(name, len(extended or ()))

    @classmethod
    def create_idle_input(
        cls, *, hidden_size: int, topk: int, dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        """Of no req, for a step in which only others compute."""
        ids = torch.empty(0, dtype=torch.int64, device=device)
        return cls(
            req_pool_indices=ids,
            req_pool_indices_cpu=(),
            verified_id=ids,
            topk_p=torch.empty(0, topk, dtype=torch.float32, device=device),
            topk_index=torch.empty(0, topk, dtype=torch.int64, device=device),
            hidden_states=torch.empty(0, hidden_size, dtype=dtype, device=device),
            accept_length=torch.empty(0, dtype=torch.int32, device=device),
            accept_length_cpu=(),
        )

    @property
    def bs(self) -> int:
        return len(self.req_pool_indices_cpu)

    @property
    def num_new_tokens(self) -> Tensor | None:
        """[bs], with the bonus."""
        return None if self.accept_length is None else self.accept_length + 1

    def filter_batch(self, rows: Sequence[int]) -> Self:
        """The rows of the reqs `rows` (by `req_pool_indices`, on the host), in that order.

        Raises: ValueError: a req that is not here, or one twice.
        """
        at = {row: i for i, row in enumerate(self.req_pool_indices_cpu)}
        strangers = [row for row in rows if row not in at]
        if strangers:
            raise ValueError(f"rows {strangers} are not among {self.req_pool_indices_cpu}")
        kept = [at[row] for row in rows]
        changed = self._take(_ROW_TENSORS + _ROW_TUPLES, kept)
        lens = self.extend_lens_cpu or (1,) * self.bs
        changed |= self._take(_TOKEN_TENSORS, _flat(kept, lens))
        if self.positions is not None:
            changed |= self._take(("positions",), _flat(kept, self._num_positions()))
        if self.req_pool_indices_for_draft_extend_cpu is not None:
            at = {row: i for i, row in enumerate(self.req_pool_indices_for_draft_extend_cpu)}
            extended = [at[row] for row in rows if row in at]
            changed |= self._take(_EXTEND_TENSORS + _EXTEND_TUPLES, extended)
        return replace(self, **changed, kv_indptr=None, kv_indices=None)

    def merge_batch(self, other: Self) -> Self:
        """These rows, then those of `other`. One without rows adds nothing, whatever it has set.

        Raises: ValueError: a req on both sides; a field set, or of another dtype, device or width,
            on one side only.
        """
        if not other.bs or not self.bs:
            return replace(self if self.bs else other, kv_indptr=None, kv_indices=None)
        if self.capture_hidden_mode != other.capture_hidden_mode:
            raise ValueError(
                f"{self.capture_hidden_mode!r} and {other.capture_hidden_mode!r} do not merge"
            )
        joined: dict[str, Any] = {}  # tensors and tuples
        for name in (*_ROW_TENSORS, *_TOKEN_TENSORS, "positions", *_EXTEND_TENSORS):
            joined[name] = _join(name, getattr(self, name), getattr(other, name))
        for name in _ROW_TUPLES + _EXTEND_TUPLES:
            mine, theirs = getattr(self, name), getattr(other, name)
            _check_both(name, mine, theirs)
            joined[name] = None if mine is None else mine + theirs
        joined["verify_done"] = tuple(dict.fromkeys(self.verify_done + other.verify_done))
        if self._uniform_positions() != other._uniform_positions():
            raise ValueError("positions of unequal numbers of tokens per req do not merge")
        return replace(self, **joined, kv_indptr=None, kv_indices=None)

    def _check_len(self, name: str, want: int) -> None:
        value = getattr(self, name)
        if value is not None and len(value) != want:
            raise ValueError(f"{name} has {len(value)} entries for {want} of its rows")

    def _num_positions(self) -> tuple[int, ...]:
        if self.extend_lens_cpu is not None:
            return self.extend_lens_cpu
        num = 0 if self.positions is None or not self.bs else len(self.positions) // self.bs
        return (num,) * self.bs

    def _uniform_positions(self) -> int | None:
        if self.positions is None or self.extend_lens_cpu is not None:
            return None
        return len(self.positions) // self.bs

    def _take(self, names: Sequence[str], kept: list[int]) -> dict[str, Any]:  # as replace takes
        taken: dict[str, Any] = {}  # tensors and tuples
        index: Tensor | None = None
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                if index is None or index.device != value.device:
                    index = torch.tensor(kept, dtype=torch.int64, device=value.device)
                taken[name] = value.index_select(0, index)
            elif value is not None:
                taken[name] = tuple(value[i] for i in kept)
        return taken


def _flat(kept: Sequence[int], lens: Sequence[int]) -> list[int]:
    """Indices of the tokens of the rows `kept` among those of all rows."""
    ends = list(accumulate(lens))
    return [token for i in kept for token in range(ends[i] - lens[i], ends[i])]


def _check_both(name: str, mine: object, theirs: object) -> None:
    if (mine is None) != (theirs is None):
        raise ValueError(f"{name} is set on one side only of a merge")


def _join(name: str, mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    _check_both(name, mine, theirs)
    if mine is None or theirs is None:
        return None
    kinds = [(x.dtype, x.device, x.shape[1:]) for x in (mine, theirs)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{name} of {kinds[0]} and of {kinds[1]} do not merge")
    return torch.cat((mine, theirs))
