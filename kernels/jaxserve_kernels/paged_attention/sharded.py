"""Attention kernels under tensor parallelism: every device runs the kernel on its own heads.

XLA cannot split a kernel as it splits its own operations: `shard_map` splits it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.paged_attention.layout import Paging

Results = tuple[Float[Array, "T N H"], Num[Array, "L P K S H2"], Num[Array, "L P K S H2"]]
AttentionKernel = Callable[[Array, Array, Array, Array, Array, Array, Paging, Array | None], Results]


def over_heads(kernel: AttentionKernel) -> AttentionKernel:
    """The kernel on each device of the mesh in context (`jax.sharding.use_abstract_mesh`), if there is one.

    Query heads, their sinks and kv heads are split alike over the mesh's one axis. Where the kv heads do not divide
    evenly every device computes all of them, as the server places the weights then.
    """

    def shared(
        q: Float[Array, "T N H"],
        k: Num[Array, "T K H"],
        v: Num[Array, "T K H"],
        k_pages: Num[Array, "L P K S H2"],
        v_pages: Num[Array, "L P K S H2"],
        layer: Int[Array, ""],
        paging: Paging,
        sinks: Float[Array, "N"] | None = None,
    ) -> Results:
        operands = (q, k, v, k_pages, v_pages, layer, paging, sinks)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1:
            return kernel(*operands)
        (axis,) = mesh.axis_names
        heads = axis if k.shape[1] % mesh.size == 0 else None
        tokens, pool, whole = PartitionSpec(None, heads), PartitionSpec(None, None, heads), PartitionSpec()
        split: AttentionKernel = jax.shard_map(
            kernel,
            in_specs=(tokens, tokens, tokens, pool, pool, whole, whole, PartitionSpec(heads)),
            out_specs=(tokens, pool, pool),
            check_vma=False,  # kernels do not say how their results vary
        )
        return split(*operands)

    return shared
