"""KernelSet: the contract of every op, whichever set runs it (reference | triton | sgl).

Shapes in brackets; `T` tokens of a step, `bs` rows (reqs), `S` slots of a KV pool, `Hq`/`Hkv`
query and KV heads of this rank, `D` head dim. A slot is the index of one token's KV;
slot 0 (page 0) is a dump that no req owns. Lengths and CSR arrays are int32, slots int64 except
in `req_to_token` and `kv_indices` (int32).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


class AttentionPlan:
    """What `plan_attention` found out; opaque, and only the set that made it looks inside."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TreeLinks:
    """A batch of trees as sgl-kernel walks them; all [bs, num_draft_tokens] int64.

    `retrieve_index[b, i]` is the flat node id `b * num_draft_tokens + i`; `retrieve_next_token`
    the first child of node i (index in the row), -1 for none; `retrieve_next_sibling` likewise.
    """

    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verify accepted. `accept_length` never counts the bonus.

    predict: [bs * num_draft_tokens] int64; the target's token at each node of an accepted path,
        0 elsewhere.
    accept_index: [bs, max_depth + 1] int64 flat node ids of the path, root first, -1 after its end.
    accept_length: [bs] int64, accepted draft tokens.
    """

    predict: Tensor
    accept_index: Tensor
    accept_length: Tensor


class KernelSet(ABC):
    """One implementation of every op. Stateless: an instance may be shared by threads."""

    name: str

    # ---- layers

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H] -> [T, H]; mean square in fp32."""

    @abstractmethod
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may reuse either input's storage."""

    @abstractmethod
    def apply_rotary(
        self, q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """q [T, Hq, D], k [T, Hkv, D], cos_sin [max_len, D] fp32 (cos half, then sin half),
        positions [T] int64; half-split (NeoX) pairs. May work in place. positions None: row t of
        cos_sin [T, D] is token t's (gathered once per step, `cos_sin[positions]`). Quickest when q
        and k are neighbouring views of one [T, (Hq + 2 * Hkv) * D] projection."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 * I] (gate, then up) -> silu(gate) * up, [T, I]."""

    # ---- KV cache

    @abstractmethod
    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor
    ) -> None:
        """k, v [T, Hkv, D] into k_cache, v_cache [S, Hkv, D] at out_cache_loc [T] int64.
        Slots are distinct, except that 0 may repeat."""

    @abstractmethod
    def move_kv(self, caches: Sequence[Tensor], src: Tensor, tgt: Tensor) -> None:
        """cache[tgt] = cache[src] for each cache [S, Hkv, D]; all of src is read before tgt is
        written. src, tgt [n] int64."""

    @abstractmethod
    def create_kv_indices(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        lens: Tensor,
        kv_indptr: Tensor,
        starts: Tensor | None,
        kv_indices: Tensor,
    ) -> None:
        """kv_indices[kv_indptr[b] + j] = req_to_token[req_pool_indices[b], starts[b] + j] for all
        j < lens[b]; starts None is 0. req_to_token [max_reqs, W] int32; req_pool_indices [bs]
        int64; lens, starts [bs] int32; kv_indptr [bs + 1] int32; kv_indices int32, at least
        kv_indptr[-1] long."""

    @abstractmethod
    def generate_draft_decode_kv_indices(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        page_size: int,
        topk: int,
        num_steps: int,
    ) -> tuple[Tensor, Tensor]:
        """(kv_indices [num_steps, n] int32, kv_indptr [num_steps, bs * topk + 1] int32): the keys
        of each lane at each draft step, prefix first, then the lane's own slots up to and with that
        step. Lanes have whole pages of their own when topk > 1 and page_size > 1."""

    @abstractmethod
    def assign_req_to_token_pool(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        starts: Tensor,
        ends: Tensor,
        src: Tensor,
    ) -> None:
        """req_to_token[req_pool_indices[b], starts[b]:ends[b]] = the b-th piece of src (flat,
        int64)."""

    @abstractmethod
    def assign_extend_cache_locs(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        starts: Tensor,
        ends: Tensor,
        total: int,
    ) -> Tensor:
        """The inverse: flat slots [total] int64; total = sum(ends - starts)."""

    @abstractmethod
    def assign_draft_cache_locs(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_lens: Tensor,
        num_new_pages_per_topk: Tensor,
        out_cache_loc: Tensor,
        topk: int,
        num_steps: int,
        page_size: int,
    ) -> Tensor:
        """Writes draft slots into the rows from seq_lens on and returns them without padding, flat
        [bs * topk * num_steps] in (req, lane, step) order, in a buffer of its own."""

    @abstractmethod
    def get_src_tgt_cache_loc(
        self,
        out_cache_loc: Tensor,
        accept_index: Tensor,
        accept_length: Tensor,
        seq_lens: Tensor,
        num_draft_tokens: int,
        page_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(src, tgt, freed): the accepted nodes' slots, the slots in line that they move to, and
        the slots behind the last page kept. out_cache_loc [bs * num_draft_tokens], accept_index
        [bs, d]."""

    @abstractmethod
    def alloc_extend(
        self,
        prefix_lens: Tensor,
        seq_lens: Tensor,
        last_loc: Tensor,
        free_pages: Tensor,
        page_size: int,
    ) -> tuple[Tensor, int] | None:
        """Slots for tokens prefix_lens[b]..seq_lens[b]-1 of each row, flat int64, and the count of
        free_pages used; None when there are too few, with no other effect. last_loc [bs] int64 is
        the slot of token prefix_lens[b]-1, -1 for none."""

    @abstractmethod
    def alloc_decode(
        self, seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, page_size: int
    ) -> tuple[Tensor, int] | None:
        """One slot per row for token seq_lens[b]-1; otherwise as alloc_extend."""

    # ---- attention; softmax in fp32, KV of this step is stored before

    def plan_attention(
        self,
        qo_indptr: Tensor | None,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        tree_mask: Tensor | None = None,
        mask_indptr: Tensor | None = None,
        *,
        q_lens: Sequence[int] | None = None,
        kv_lens: Sequence[int] | None = None,
    ) -> AttentionPlan | None:
        """What attention needs of a batch and not of a layer (masks, 64-bit indices, rows whose
        slots are one run), computed once per step. Pass the result as `plan=` to every layer's
        decode_attention (qo_indptr None here: one query per row) or extend_attention, together with
        the very tensors it was made of; a batch with both kinds of rows makes one plan for each.
        q_lens and kv_lens are the host's copies of the row lengths and save a device sync.
        Optional: attention without a plan makes its own. None: this set has nothing to plan."""
        return None

    @abstractmethod
    def decode_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """One query per row: q [bs, Hq, D] over the row's kv_indices -> [bs, Hq, D]."""

    @abstractmethod
    def extend_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        tree_mask: Tensor | None,
        mask_indptr: Tensor | None,
        scale: float,
        plan: AttentionPlan | None = None,
    ) -> Tensor:
        """Many queries per row: q [T, Hq, D] -> [T, Hq, D]. Row b's keys are all its tokens, this
        step's last. Causal, aligned at the end, where mask_indptr gives the row no cells. Otherwise
        tree_mask (bool, flat) holds [q_len, tree_len] cells from mask_indptr[b] on, over the last
        tree_len keys; earlier keys are always seen. mask_indptr [bs + 1] int32."""

    # ---- trees and verification

    @abstractmethod
    def build_tree_links(self, parents: Tensor) -> TreeLinks:
        """parents [bs, num_draft_tokens] int64 (root -1 in column 0; -2 marks padding nodes, which
        are linked nowhere) -> links; children of one parent in ascending node order."""

    @abstractmethod
    def verify_tree_greedy(
        self, draft_ids: Tensor, links: TreeLinks, target_ids: Tensor, max_depth: int
    ) -> VerifyResult:
        """Walks each tree from its root while the target's token at a node equals a child's.
        draft_ids, target_ids [bs, num_draft_tokens] int64."""

    # ---- sampling

    @abstractmethod
    def noise_bits(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Counter-based noise: keys [n, 2] int64 (two 32-bit words of seed and position), token_ids
        [n, m] int64 -> [n, m] int64 of 24 uniform bits, equal on every device and set."""
