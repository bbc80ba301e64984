"""KernelSet: the contract of every op, whichever set runs it (reference | triton | sgl).

Shapes in brackets; `T` tokens of a step, `bs` rows (reqs), `S` slots of a KV pool, `Hq`/`Hkv`
query and KV heads of this rank, `D` head dim. A slot is the index of one token's KV;
slot 0 (page 0) is a dump that no req owns. Lengths and CSR arrays are int32, slots int64 except
in `req_to_token` and `kv_indices` (int32).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

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


class TreeMaskMode(IntEnum):
    """How a tree's mask is laid out; cell j of node i is true where i attends to node j.

    FULL_MASK: bool, req after req [num_draft_tokens, seq_len + num_draft_tokens], the prefix true.
    QLEN_ONLY: bool, the last num_draft_tokens columns of that.
    QLEN_ONLY_BITPACKING: the same as one unsigned number per node, bit j for column j, of 8, 16 or
        32 bits, the fewest that num_draft_tokens fits in.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


@dataclass(frozen=True, slots=True)
class BuiltTrees:
    """A batch of trees, ready for a verify.

    draft_ids: [bs, num_draft_tokens] int64, the root in column 0.
    positions: [bs * num_draft_tokens] int64, seq_lens[b] + the node's depth.
    tree_mask: flat, as its mode says.
    """

    draft_ids: Tensor
    links: TreeLinks
    positions: Tensor
    tree_mask: Tensor


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
    """One implementation of every op. Stateless: an instance may be shared by threads.

    Serving calls `rms_norm`, `add_rms_norm`, `apply_rotary`, `silu_and_mul`, `store_kv`, `move_kv`,
    `create_kv_indices`, `plan_attention`, `decode_attention`, `extend_attention`,
    `build_tree_links`, `verify_tree_greedy` and `noise_bits`; to verify by rejection
    `tree_speculative_sampling_target_only`; and where steps overlap `build_tree`. The other ops are
    for schedulers that hand out slots on the device, which today's do on the host.
    """

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
    def get_draft_cache_locs(
        self,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        topk: int,
        num_steps: int,
        page_size: int,
    ) -> Tensor:
        """The draft slots that the rows hold already from seq_lens on, flat
        [bs * topk * num_steps] int64 in (req, lane, step) order; lanes stand as in
        `generate_draft_decode_kv_indices`. Writes nothing."""

    @abstractmethod
    def fill_accepted_out_cache_loc(self, accept_index: Tensor, out_cache_loc: Tensor) -> Tensor:
        """The slots of all accepted nodes, in order and without gaps, then slot 0:
        [accept_index.numel()] int64. accept_index [bs, d], out_cache_loc
        [bs * num_draft_tokens] int64."""

    @abstractmethod
    def filter_finished_cache_loc(
        self, tgt_cache_loc: Tensor, accept_length: Tensor, accept_length_filter: Tensor, total: int
    ) -> Tensor:
        """Of each req's accept_length[b] + 1 slots in flat tgt_cache_loc the first
        accept_length_filter[b]; [total] int64, total = sum(accept_length_filter)."""

    @abstractmethod
    def align_evict_mask_to_page_size(
        self, evict_mask: Tensor, seq_lens: Tensor, page_size: int
    ) -> Tensor:
        """evict_mask [bs, num_draft_tokens] bool of chains, false for the nodes kept, which come
        first -> the same without the page of the last token kept."""

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

    @abstractmethod
    def build_tree(
        self,
        verified_id: Tensor,
        parents: Tensor,
        selected: Tensor,
        draft_ids: Tensor,
        seq_lens: Tensor,
        topk: int,
        mask_mode: TreeMaskMode,
        *,
        seq_lens_sum: int | None = None,
        tree_mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> BuiltTrees:
        """Trees of the candidates that drafting chose. Candidate g of a req is a child of the root
        where g < topk, else of candidate parents[b, g // topk].

        verified_id [bs]; parents [bs, n] int64 (num_steps 1: never read); selected
        [bs, num_draft_tokens - 1] int64, distinct, ascending: node i is candidate selected[b, i-1];
        draft_ids their tokens. A node whose parent does not stand before it attends to prefix, root
        and itself, at depth 1, and is linked nowhere. tree_mask and positions: buffers to use, at
        least as long as needed; what lies behind is left alone. seq_lens_sum saves a sync where
        FULL_MASK gets no buffer.
        Raises: ValueError: more than 32 nodes to pack into bits, or a buffer is too short."""

    @abstractmethod
    def reconstruct_indices_from_tree_mask(
        self, tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int
    ) -> tuple[TreeLinks, Tensor]:
        """(links, positions [bs * num_draft_tokens]) of trees given as QLEN_ONLY masks whose
        ancestors stand before their descendants. A row that sees nothing before itself is linked
        nowhere and has depth 0."""

    @abstractmethod
    def segment_packbits(
        self, x: Tensor, input_indptr: Tensor, output_indptr: Tensor, y: Tensor
    ) -> None:
        """Packs each segment of x (flat bool) into bytes of y (uint8), first bit lowest, the last
        byte filled up with zeros. Segment b is x[input_indptr[b]:input_indptr[b + 1]] and goes to
        y[output_indptr[b]] and on; both int32 [bs + 1]."""

    @abstractmethod
    def tree_speculative_sampling_target_only(
        self,
        draft_ids: Tensor,
        links: TreeLinks,
        target_probs: Tensor,
        coins: Tensor,
        final_coins: Tensor,
        max_depth: int,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
    ) -> VerifyResult:
        """Walks each tree by chance: at a node with distribution q its children are tried in
        order, q of those tried is summed up, and a child of q > 0 is accepted where the node's coin
        is below sum / threshold_acc or its q at least threshold_single. The token after the path is
        drawn from q without the children refused there; after max_depth drafts, from all of q.
        With both thresholds 1 the tokens are distributed as the target's.

        draft_ids [bs, num_draft_tokens] int64, children of one node distinct, ids outside the
        vocabulary never accepted; target_probs [bs, num_draft_tokens, V] fp32; coins
        [bs, num_draft_tokens] and final_coins [bs] fp32, uniform in [0, 1).
        Raises: ValueError: a threshold outside [0, 1]."""

    @abstractmethod
    def fill_new_verified_id(self, accepted_ids: Tensor, num_new_tokens: Tensor) -> Tensor:
        """accepted_ids[b, num_new_tokens[b] - 1] -> [bs]; accepted_ids [bs, d], one row per
        path."""

    @abstractmethod
    def create_extend_after_decode_spec_info(
        self, verified_id: Tensor, seq_lens: Tensor, num_new_tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(positions int64, last id of each req [bs]) of the new tokens verified_id, flat over
        reqs, num_new_tokens[b] >= 1 each. seq_lens [bs] count them."""

    @abstractmethod
    def create_accept_length_filter(
        self, accept_length: Tensor, is_finished: Tensor, seq_lens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(accept_length_filter, seq_lens with the new tokens), both [bs]: accept_length + 1
        tokens for a req that goes on, 0 for one that is_finished [bs] bool; every req's seq_len
        grows."""

    # ---- sampling

    @abstractmethod
    def top_k_renorm(self, probs: Tensor, top_k: Tensor) -> Tensor:
        """Keeps of each row every value that is at least its top_k-th largest, ties included,
        divided by their sum. probs [n, V] fp32; top_k [n] int >= 1, from V on a row stays."""

    @abstractmethod
    def top_p_renorm(self, probs: Tensor, top_p: Tensor) -> Tensor:
        """Keeps of each row the fewest largest values that sum to top_p or more, and all that
        equal the least of them, divided by their sum. probs [n, V] fp32, top_p [n] fp32 > 0; from 1
        on a row stays."""

    @abstractmethod
    def noise_bits(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Counter-based noise: keys [n, 2] int64 (two 32-bit words of seed and position), token_ids
        [n, m] int64 -> [n, m] int64 of 24 uniform bits, equal on every device and set."""
