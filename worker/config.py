"""The frozen settings of one process, built once and passed down."""

from dataclasses import dataclass
from typing import Literal

SpecMethod = Literal["none", "ngram", "standalone", "eagle", "eagle3"]
Overlap = Literal["auto", "on", "off"]
VerifyRule = Literal["coupled", "rejection"]
SimulatedMethod = Literal["match-expected", "multinomial"]
KernelSetName = Literal["auto", "reference", "native", "triton", "sgl"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint directory and what its config.json says (worker/models/registry.py reads it)."""

    path: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # tokens of prompt and output together, after the user's own limit
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, float | str], ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "bfloat16"  # of weights, activations and KV
    skip_layers: tuple[int, ...] = ()  # layers left out, for drafts made from their own target
    num_positions: int = 0  # that the checkpoint has, no matter the user's limit; 0: unread


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int = 16
    # Pages of the pool without the reserved page 0; 0 sizes it from free memory.
    num_pages: int = 0
    # Bytes of the pool per rank at most when sized from free memory; 0 means the default.
    max_bytes: int = 0
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 32  # reqs running at once
    max_num_batched_tokens: int = 2048  # tokens in one step
    chunked_prefill_size: int = 512  # prompt tokens of one req in one step; 0 means whole prompts


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """How drafts are made and verified; bounds and derived sizes are in worker/spec/limits.py."""

    method: SpecMethod = "none"
    num_steps: int = 4  # depth
    topk: int = 1  # branches kept per depth
    num_draft_tokens: int = 5  # nodes with the root; num_steps + 1 at most when topk is 1
    draft_timeout_s: float = 1.0  # lockstep: how long a step waits for proposals at most
    draft_model: str = ""  # directory of a draft that the target's own ranks compute
    # Of method standalone; a head needs its target's hidden states, so it is always with it.
    placement: Literal["colocated", "decoupled"] = "decoupled"
    overlap: Overlap = "auto"  # steps launched before the last one is read; auto: on a GPU
    token_map: str = ""  # file of the target ids that an EAGLE-1 or -2 head may guess
    ngram_corpus: str = ""  # file of texts that n-gram guesses may come from
    rule: VerifyRule = "coupled"
    threshold_single: float = 1.0  # rejection: a draft of this probability is always accepted
    threshold_acc: float = 1.0  # rejection: siblings' probabilities are divided by it
    adaptive: bool = True  # fewer drafts, or none, where they do not pay
    # Tokens per step with the bonus, made up for benchmarks; 0 verifies for real.
    simulated_accept_length: float = 0.0
    simulated_method: SimulatedMethod = "match-expected"

    @property
    def is_colocated(self) -> bool:
        """Whether the target's own ranks grow the drafts."""
        if self.method == "standalone":
            return self.placement == "colocated"
        return self.method in ("eagle", "eagle3")

    @property
    def is_simulated(self) -> bool:
        return self.simulated_accept_length > 0.0


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    tp_size: int = 1
    tp_rank: int = 0
    backend: Literal["local", "gloo", "nccl"] = "local"
    rendezvous: str = ""  # "host:port" of rank 0's store when tp_size > 1
    timeout_s: float = 60.0  # of one collective


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything one rank needs."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    spec: SpecConfig = SpecConfig()
    parallel: ParallelConfig = ParallelConfig()
    kernels: KernelSetName = "auto"
    device: str = "cpu"
    num_threads: int = 0  # torch threads; 0 leaves torch's choice
    cuda_graphs: bool = True  # steps that repeat are recorded, where they can be (worker/graphs.py)
    # A token's logits depend, bit for bit, on the tokens before it alone (docs/numerics.md).
    deterministic: bool = False
