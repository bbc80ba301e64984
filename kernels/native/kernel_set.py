"""NativeKernels: the reference set, its hot ops replaced by compiled ones. Serves a CPU.

A torch op costs a small step more to call than to compute: a layer of 8 rows spends as long on
norms, rotary and attention as on its projections. Here each of these is one call.
"""

from paceline.kernels.native import ops
from paceline.kernels.reference.kernel_set import ReferenceKernels


class NativeKernels(ReferenceKernels):
    """Other dtypes, and ops that are not here, run as in the reference set."""

    name = "native"

    rms_norm = staticmethod(ops.rms_norm)
    add_rms_norm = staticmethod(ops.add_rms_norm)
    apply_rotary = staticmethod(ops.apply_rotary)
    silu_and_mul = staticmethod(ops.silu_and_mul)
    store_kv = staticmethod(ops.store_kv)
    plan_attention = staticmethod(ops.plan_attention)
    decode_attention = staticmethod(ops.decode_attention)

    def __init__(self) -> None:
        """Raises: NativeBuildError: the kernels cannot be built here."""
        ops.bind()
