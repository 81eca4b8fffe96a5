"""Products with the weights of experts for Hopper GPUs in Pallas Mosaic GPU.

Only `kernel` imports Pallas, and only programs for GPUs import that.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxserve_kernels.grouped_matmul.tuning import GroupedTuning, grouped_tuning

Operand = jax.Array | jax.ShapeDtypeStruct
_DEVICE = "h200"
"""Whose sizes are taken. Other Hoppers have the same multiprocessors."""
_FIRST_JAX = (0, 11, 2)
WORKERS = 2
"""Warpgroups of a program that compute."""
_LEAST_OUTPUTS = 64
"""Of a worker, where more would not divide them all."""


def choice(x: Operand, weight: Operand) -> GroupedTuning | None:
    """Sizes for a product of rows with float weights of experts; None: the reference computes it.

    Nobody measured them. The kernel is taken because of how often the reference reads weights, see README.
    """
    (num_rows, num_inputs), (num_experts, num_outputs, _) = x.shape, weight.shape
    sizes = grouped_tuning(_DEVICE, num_rows // num_experts)
    if num_outputs % (WORKERS * sizes.outputs):
        sizes = replace(sizes, outputs=_LEAST_OUTPUTS)
    is_supported = (
        jax.__version_info__ >= _FIRST_JAX
        and x.dtype == weight.dtype
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and num_outputs % (WORKERS * sizes.outputs) == 0
        and num_inputs % sizes.inputs == 0
    )
    return sizes if is_supported else None
