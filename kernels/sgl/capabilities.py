"""What the installed sgl-kernel offers; importable without it."""

from functools import cache
from importlib.util import find_spec

# The ops that `dispatch` knows how to call.
KNOWN_OPS = (
    "rmsnorm",
    "fused_add_rmsnorm",
    "silu_and_mul",
    "verify_tree_greedy",
    "reconstruct_indices_from_tree_mask",
    "segment_packbits",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
)


@cache
def probe_ops() -> frozenset[str]:
    """The known ops that this build exports, none where it is absent or does not load."""
    if find_spec("sgl_kernel") is None:
        return frozenset()
    try:
        import sgl_kernel
    except (ImportError, OSError, RuntimeError):  # a library of it is missing, or another GPU's
        return frozenset()
    return frozenset(name for name in KNOWN_OPS if hasattr(sgl_kernel, name))
