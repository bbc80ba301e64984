"""check_rows: tries out, at a start, that ops give a row the same bits whatever rows are beside it.

A deterministic kernel set stands on how torch's library, or a compiler, orders its sums on this
very processor. What is true where it was written may be false elsewhere, and nothing would show
it but an answer that differs now and then. So a rank tries its ops on the shapes of its model
before it serves. Products by weights are tried by worker/layers/row_tiles.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError

_NUM_ROWS = 33
_PREFIX_LEN = 100  # keys before a chunk or tree: more than one tile, and not whole tiles
_CHUNK_LEN = 70
_PARENTS = (-1, 0, 0, 1, 2, 2, 5)
_NEIGHBOUR_LENS = (1, 7, 64)
_EPS = 1e-5


@torch.inference_mode()
def check_rows(
    kernels: KernelSet, model: ModelConfig, num_heads: int, num_kv_heads: int, mlp_size: int
) -> None:
    """
    Args:
        num_heads, num_kv_heads, mlp_size: of this rank.
    Raises: ConfigError: names the op whose result for a row is not the row's own.
    """
    # In fp32 a difference shows that rounding to less would hide nearly every time.
    for dtype in dict.fromkeys((torch.float32, getattr(torch, model.dtype))):
        text = _Text(dtype, num_heads, num_kv_heads, model.head_dim)
        failed = [
            *_failed_row_ops(kernels, model.hidden_size, mlp_size, dtype),
            *_AttentionCheck(kernels, text).failures(),
        ]
        if failed:
            raise ConfigError(
                f"deterministic cannot be kept on this processor: of kernel set '{kernels.name}', "
                f"{', '.join(failed)} in {str(dtype).removeprefix('torch.')} gave a row other bits "
                "beside other rows; try another kernel set, or serve without deterministic"
            )


def _failed_row_ops(
    kernels: KernelSet, hidden_size: int, mlp_size: int, dtype: torch.dtype
) -> list[str]:
    gen = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(_NUM_ROWS + 1, hidden_size, generator=gen).to(dtype).split([_NUM_ROWS, 1])
    )
    gates = torch.randn(_NUM_ROWS, 2 * mlp_size, generator=gen).to(dtype)

    def norm(x: Tensor) -> Tensor:
        return kernels.rms_norm(x, weight[0], _EPS)

    def add_norm(x: Tensor) -> Tensor:
        return kernels.add_rms_norm(x.clone(), x.clone(), weight[0], _EPS)[0]

    failed = [op.__name__ for op in (norm, add_norm) if not _is_row_wise(op, hidden)]
    return failed if _is_row_wise(kernels.silu_and_mul, gates) else [*failed, "silu_and_mul"]


def _is_row_wise(op: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    whole = op(x)
    parts = [op(x[i : i + 1]) for i in range(len(x))]
    return torch.equal(whole, torch.cat(parts))


class _Text:
    """Queries, keys and values of one text. Slot 0 is nobody's; token i lies in slot len - i."""

    def __init__(
        self, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        gen = torch.Generator().manual_seed(1)
        text_len = _PREFIX_LEN + _CHUNK_LEN
        self.q = torch.randn(text_len, num_heads, head_dim, generator=gen).to(dtype)
        self.k = torch.randn(text_len + 1, num_kv_heads, head_dim, generator=gen).to(dtype)
        self.v = torch.randn(text_len + 1, num_kv_heads, head_dim, generator=gen).to(dtype)
        self.k[0], self.v[0] = 0, 0
        self.slots = list(range(text_len, 0, -1))


class _AttentionCheck:
    """Every token of a text is decoded alone, and then computed in other company."""

    def __init__(self, kernels: KernelSet, text: _Text) -> None:
        self._kernels = kernels
        self._q, self._k, self._v, self._slots = text.q, text.k, text.v, text.slots
        self._scale = text.q.shape[2] ** -0.5

    def failures(self) -> list[str]:
        text_len = len(self._q)
        alone = [self._decode([i])[0] for i in range(text_len)]
        chunk = list(range(_PREFIX_LEN, text_len))
        batch = [*(n - 1 for n in _NEIGHBOUR_LENS), *chunk[:5]]
        wanted = {
            "attention of a prompt": (self._chunk(chunk), chunk),
            "attention of part of a prompt": (self._chunk(chunk[:9]), chunk[:9]),
            "attention of a batch": (self._decode(batch), batch),
        }
        failed = [
            name
            for name, (got, tokens) in wanted.items()
            if not torch.equal(got, torch.stack([alone[i] for i in tokens]))
        ]
        return failed if self._has_exact_trees() else [*failed, "attention of a tree"]

    def _decode(self, tokens: list[int]) -> Tensor:
        return self._decode_keys(self._q[tokens], [self._slots[: i + 1] for i in tokens])

    def _decode_keys(self, q: Tensor, keys: list[list[int]]) -> Tensor:
        return self._kernels.decode_attention(
            q,
            self._k,
            self._v,
            _starts([len(slots) for slots in keys]),
            _ints([slot for slots in keys for slot in slots]),
            self._scale,
        )

    def _chunk(self, tokens: list[int]) -> Tensor:
        slots = self._slots[: tokens[-1] + 1]
        return self._kernels.extend_attention(
            self._q[tokens], self._k, self._v, _starts([len(tokens)]), _starts([len(slots)]),
            _ints(slots), None, None, self._scale,
        )  # fmt: skip

    def _has_exact_trees(self) -> bool:
        num_nodes = len(_PARENTS)
        sees = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
        for node, parent in enumerate(_PARENTS):
            if parent >= 0:
                sees[node] = sees[parent]
            sees[node, node] = True
        stop = _PREFIX_LEN + num_nodes
        q, slots = self._q[_PREFIX_LEN:stop], self._slots[:stop]
        got = self._kernels.extend_attention(
            q, self._k, self._v, _starts([num_nodes]), _starts([stop]), _ints(slots),
            sees.flatten(), _starts([num_nodes**2]), self._scale,
        )  # fmt: skip
        prefix, nodes = slots[:_PREFIX_LEN], slots[_PREFIX_LEN:]
        for i in range(num_nodes):
            keys = prefix + [nodes[j] for j in range(num_nodes) if sees[i, j]]
            if not torch.equal(got[i], self._decode_keys(q[i : i + 1], [keys])[0]):
                return False
        return True


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _starts(lens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
