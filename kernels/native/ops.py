"""The compiled ops: each checks what it can take, and leaves the rest to the reference.

A compiled op takes dense fp32 or bfloat16 tensors of a CPU, and dense indices of the dtypes that
`KernelSet` names. `bind` must have been called.
"""

from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.api import AttentionPlan
from paceline.kernels.checks import check_attention, check_kv
from paceline.kernels.native.build import load_library
from paceline.kernels.reference import act, attend, norm, rope
from paceline.kernels.reference.decode_attention import decode_attention as reference_decode
from paceline.kernels.reference.store_kv import store_kv as reference_store

_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
MAX_HEAD_DIM = 256

_P, _L, _I = c_void_p, c_int64, c_int
_SIGNATURES: dict[str, list[Any]] = {  # of ctypes types
    "add_rms_norm": [_P, _P, _P, _P, _L, _I, c_float],
    "apply_rotary": [_P, _L, _P, _L, _P, _P, _L, _I, _I, _I],
    "silu_and_mul": [_P, _P, _L, _I],
    "store_kv": [_P, _L, _P, _L, _P, _P, _P, _L, _I, _L],
    "decode_attention": [_P, _L, _P, _P, _P, _P, _P, _I, _I, _I, _I, c_float],
}
_NOTHING = attend.RowPlan((), is_whole=False)

_Functions = dict[torch.dtype, Any]  # of ctypes
_norms: _Functions = {}
_rotaries: _Functions = {}
_activations: _Functions = {}
_stores: _Functions = {}
_decodes: _Functions = {}


def bind() -> None:
    """Builds or finds the compiled functions. Raises: NativeBuildError."""
    library = load_library()
    tables = (_norms, _rotaries, _activations, _stores, _decodes)
    for (op, signature), table in zip(_SIGNATURES.items(), tables, strict=True):
        for dtype, suffix in _SUFFIXES.items():
            function = getattr(library, f"{op}_{suffix}")
            function.argtypes = signature
            function.restype = c_int64 if op == "store_kv" else None
            table[dtype] = function


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    run = _norms.get(x.dtype)
    if run is None or not x.is_contiguous() or not _is_dense(weight, x.dtype):
        return norm.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    run(None, x.data_ptr(), weight.data_ptr(), out.data_ptr(), *_rows_of(x), eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    run = _norms.get(x.dtype)
    if (
        run is None
        or not x.is_contiguous()
        or not _is_dense(residual, x.dtype)
        or not _is_dense(weight, x.dtype)
    ):
        return norm.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    run(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), *_rows_of(x), eps)
    return out, residual


def apply_rotary(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    rotate = _rotaries.get(q.dtype)
    if (
        rotate is None
        or k.dtype != q.dtype
        or not _is_dense(cos_sin, torch.float32)
        or not (positions is None or _is_dense(positions, torch.int64))
        or not (_has_dense_heads(q) and _has_dense_heads(k))
    ):
        return rope.apply_rotary(q, k, cos_sin, positions)
    rotate(
        q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), cos_sin.data_ptr(),
        None if positions is None else positions.data_ptr(),
        q.shape[0], q.shape[1], k.shape[1], q.shape[2],
    )  # fmt: skip
    return q, k


def silu_and_mul(gate_up: Tensor) -> Tensor:
    run = _activations.get(gate_up.dtype)
    if run is None or not gate_up.is_contiguous():
        return act.silu_and_mul(gate_up)
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    run(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // max(2 * size, 1), size)
    return out


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    store = _stores.get(k.dtype)
    if (
        store is None
        or v.dtype != k.dtype
        or not (_is_dense(k_cache, k.dtype) and _is_dense(v_cache, k.dtype))
        or not _is_dense(out_cache_loc, torch.int64)
        or out_cache_loc.shape != k.shape[:1]
    ):
        reference_store(k, v, k_cache, v_cache, out_cache_loc)
        return
    check_kv(k, v, k_cache, v_cache)
    num_stored = store(
        k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_cache.data_ptr(),
        v_cache.data_ptr(), out_cache_loc.data_ptr(), k.shape[0], k.shape[1] * k.shape[2],
        k_cache.shape[0],
    )  # fmt: skip
    if num_stored < k.shape[0]:
        slot = int(out_cache_loc[num_stored])
        raise IndexError(f"slot {slot} is not one of the {k_cache.shape[0]} of the cache")


def plan_attention(
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    *,
    q_lens: Sequence[int] | None = None,
    kv_lens: Sequence[int] | None = None,
) -> attend.RowPlan:
    """Nothing for rows of one query, which are not planned here."""
    if qo_indptr is None:
        return _NOTHING
    return attend.plan_attention(
        qo_indptr, kv_indptr, kv_indices, tree_mask, mask_indptr, q_lens=q_lens, kv_lens=kv_lens
    )


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    is_indexed = _is_dense(kv_indptr, torch.int32) and _is_dense(kv_indices, torch.int32)
    if not is_indexed or not can_attend(q, k_cache, v_cache):
        return reference_decode(q, k_cache, v_cache, kv_indptr, kv_indices, scale)
    check_attention(q, k_cache, v_cache)
    out = torch.empty(q.shape, dtype=q.dtype)
    _decodes[q.dtype](
        q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(), kv_indptr.data_ptr(),
        kv_indices.data_ptr(), out.data_ptr(), q.shape[0], q.shape[1], k_cache.shape[1],
        q.shape[2], scale,
    )  # fmt: skip
    return out


def can_attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `decode_attention` is the compiled one for these."""
    return (
        q.dtype in _decodes
        and _is_dense(k_cache, q.dtype)
        and _is_dense(v_cache, q.dtype)
        and _has_dense_heads(q)
        and q.shape[2] <= MAX_HEAD_DIM
    )


def _rows_of(x: Tensor) -> tuple[int, int]:
    size = x.shape[-1]
    return x.numel() // size, size


def _is_dense(x: Tensor, dtype: torch.dtype) -> bool:
    return x.dtype == dtype and x.is_contiguous()


def _has_dense_heads(x: Tensor) -> bool:
    """[T, heads, D] whose rows may stand apart, but not its heads."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
