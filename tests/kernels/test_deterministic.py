"""The deterministic sets: a row's bits are its own, and what they mean is the reference's."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.kernels.api import KernelSet
from paceline.kernels.reference.deterministic import DeterministicReference
from paceline.kernels.reference.kernel_set import ReferenceKernels
from paceline.kernels.registry import available_kernel_sets, load_kernels
from paceline.worker.config import ModelConfig
from paceline.worker.errors import ConfigError
from paceline.worker.target.self_check import check_rows


def model_config(dtype: str = "bfloat16") -> ModelConfig:
    return ModelConfig(
        "", "", 264, 72, 96, 3, 9, 3, head_dim=64, max_model_len=512, rms_norm_eps=1e-5,
        rope_theta=1e4, dtype=dtype,
    )  # fmt: skip


def is_kept_here(name: str) -> bool:
    """The reference set stands on MKL, which is row-wise with AVX-512 and not with AVX2."""
    try:
        check_rows(load_kernels(name, "cpu", deterministic=True), model_config(), 9, 3, 96)
    except ConfigError:
        return False
    return True


SETS = [
    name
    for name in available_kernel_sets("cpu")
    if name in ("reference", "native") and is_kept_here(name)
]
# No compiled op takes fp16: it runs as in the reference set.
DTYPES = [torch.float32, torch.bfloat16, *([torch.float16] if "reference" in SETS else [])]
NUM_SLOTS = 3000


@pytest.fixture(scope="module", params=SETS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return load_kernels(request.param, "cpu", deterministic=True)


@dataclass
class Rows:
    """Rows of an extend; of each query the slots that it sees, in the order of its text."""

    q_lens: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    cells: list[Tensor | None] = field(default_factory=list)
    seen: list[list[int]] = field(default_factory=list)

    def add(self, slots: list[int], q_len: int, parents: list[int] | None) -> None:
        self.q_lens.append(q_len)
        self.slots.append(slots)
        prefix, own = slots[: len(slots) - q_len], slots[len(slots) - q_len :]
        if parents is None:
            self.cells.append(None)
            self.seen += [prefix + own[: i + 1] for i in range(q_len)]
            return
        sees = torch.zeros(q_len, q_len, dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                sees[node] = sees[parent]
            sees[node, node] = True
            self.seen.append(prefix + [own[j] for j in range(q_len) if sees[node, j]])
        self.cells.append(sees.flatten())

    def attend(
        self, kernels: KernelSet, q: Tensor, k: Tensor, v: Tensor, *, with_plan: bool
    ) -> Tensor:
        masks = [cells for cells in self.cells if cells is not None]
        qo, kv = starts(self.q_lens), starts([len(slots) for slots in self.slots])
        indices = ints([slot for slots in self.slots for slot in slots])
        mask = torch.cat(masks) if masks else None
        mask_lens = [0 if cells is None else len(cells) for cells in self.cells]
        indptr = starts(mask_lens) if masks else None
        plan = kernels.plan_attention(qo, kv, indices, mask, indptr) if with_plan else None
        return kernels.extend_attention(q, k, v, qo, kv, indices, mask, indptr, 0.125, plan)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lens: list[int]) -> Tensor:
    found = [0]
    for length in lens:
        found.append(found[-1] + length)
    return ints(found)


def decode(kernels: KernelSet, q: Tensor, k: Tensor, v: Tensor, slots: list[list[int]]) -> Tensor:
    lens = [len(some) for some in slots]
    indices = ints([slot for some in slots for slot in some])
    return kernels.decode_attention(q, k, v, starts(lens), indices, 0.125)


def random_rows(rng: random.Random, num_rows: int) -> Rows:
    rows = Rows()
    for _ in range(num_rows):
        kind = rng.choice(["decode", "chunk", "tree", "long"])
        q_len = {
            "decode": 1,
            "chunk": rng.randint(2, 40),
            "tree": rng.randint(2, 9),
            "long": rng.randint(129, 200),
        }[kind]
        prefix_len = rng.choice([0, 1, 30, 63, 64, 65, 127, 128, 200, 400])
        slots = rng.sample(range(1, NUM_SLOTS), prefix_len + q_len)
        parents = [-1, *(rng.randint(0, i - 1) for i in range(1, q_len))]
        rows.add(slots, q_len, parents if kind == "tree" else None)
    return rows


def tensors(
    seed: int, num_queries: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv_heads, head_dim = heads
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(num_queries, num_heads, head_dim, generator=gen).to(dtype)
    k = torch.randn(NUM_SLOTS, num_kv_heads, head_dim, generator=gen).to(dtype)
    v = torch.randn(NUM_SLOTS, num_kv_heads, head_dim, generator=gen).to(dtype)
    k[0], v[0] = 0, 0
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (9, 3, 8), (4, 4, 24), (6, 1, 128)])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), num_rows=st.integers(1, 6), with_plan=st.booleans())
@example(seed=1, num_rows=6, with_plan=True)
def test_a_query_has_the_bits_of_its_token_decoded_alone(
    kernels: KernelSet,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int,
    num_rows: int,
    with_plan: bool,
) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, num_rows)
    q, k, v = tensors(seed, len(rows.seen), heads, dtype)
    got = rows.attend(kernels, q, k, v, with_plan=with_plan)
    some = rng.sample(range(len(q)), min(len(q), 12))
    for i in some:
        assert torch.equal(got[i], decode(kernels, q[i : i + 1], k, v, [rows.seen[i]])[0])
    together = decode(kernels, q[some], k, v, [rows.seen[i] for i in some])
    assert torch.equal(got[some], together)
    expected = rows.attend(ReferenceKernels(), q.float(), k.float(), v.float(), with_plan=False)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_query_is_not_scaled_in_place(kernels: KernelSet) -> None:
    q, k, v = tensors(0, 3, (9, 3, 64), torch.float32)
    before = q.clone()
    decode(kernels, q, k, v, [[1, 2], [3], [4, 5, 6]])
    assert torch.equal(q, before)


def test_a_row_without_keys_gives_0(kernels: KernelSet) -> None:
    q, k, v = tensors(0, 2, (9, 3, 64), torch.float32)
    assert decode(kernels, q, k, v, [[], [1, 2]])[0].count_nonzero() == 0


def test_a_neighbour_that_is_not_a_number_stays_alone(kernels: KernelSet) -> None:
    q, k, v = tensors(0, 5, (9, 3, 64), torch.bfloat16)
    good, bad = list(range(1, 70)), list(range(70, 90))
    alone = decode(kernels, q[:1], k, v, [good])
    k[bad], v[bad] = torch.nan, torch.nan
    together = decode(kernels, q[:2], k, v, [good, bad])
    assert torch.equal(together[0], alone[0])
    assert together[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 48, 50, 1536])
def test_a_row_of_the_activation_has_the_same_bits_in_any_company(
    kernels: KernelSet, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(777, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = kernels.silu_and_mul(x)
    alone = torch.cat([kernels.silu_and_mul(x[i : i + 1]) for i in range(0, 777, 7)])
    assert torch.equal(whole[::7], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_deterministic_set_passes_the_check_of_a_start(
    kernels: KernelSet, dtype: torch.dtype
) -> None:
    check_rows(kernels, model_config(str(dtype).removeprefix("torch.")), 9, 3, 96)


def nudged(x: Tensor, num_rows: int) -> Tensor:
    """Off by a bit where rows are not alone."""
    return x if num_rows == 1 else torch.nextafter(x, x + 1)


class UnevenNorm(DeterministicReference):
    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return nudged(ReferenceKernels.rms_norm(x, weight, eps), len(x))


class UnevenActivation(DeterministicReference):
    @staticmethod
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        return nudged(DeterministicReference.silu_and_mul(gate_up), len(gate_up))


class UnevenDecode(DeterministicReference):
    @staticmethod
    def decode_attention(q: Tensor, *args: Any) -> Tensor:  # Any: the set's own
        return nudged(DeterministicReference.decode_attention(q, *args), len(q))


class UnevenTrees(DeterministicReference):
    @staticmethod
    def extend_attention(q: Tensor, *args: Any) -> Tensor:  # Any: as above
        out = DeterministicReference.extend_attention(q, *args)
        return out if args[5] is None else nudged(out, len(q))


@pytest.mark.parametrize(
    ("uneven", "names"),
    [
        (UnevenNorm, "norm"),
        (UnevenActivation, "silu_and_mul"),
        (UnevenDecode, "attention of a batch"),
        (UnevenTrees, "attention of a tree"),
    ],
)
def test_the_check_of_a_start_names_an_op_that_looks_at_neighbours(
    uneven: type[KernelSet], names: str
) -> None:
    with pytest.raises(ConfigError, match="cannot be kept on this processor") as raised:
        check_rows(uneven(), model_config(), 9, 3, 96)
    assert names in str(raised.value)


def test_a_set_or_device_without_a_deterministic_form_is_refused() -> None:
    assert load_kernels("auto", "cpu", deterministic=True).name in ("reference", "native")
    for name in available_kernel_sets("cpu"):
        if name not in ("reference", "native"):
            with pytest.raises(ValueError, match="has no deterministic form; use device 'cpu'"):
                load_kernels(name, "cpu", deterministic=True)
