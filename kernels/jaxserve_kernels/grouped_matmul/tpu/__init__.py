"""Matmuls with the weights of experts on TPUs: of bfloat16 by JAX's own kernel, of 8 and 4 bits by ours (`small`). Both read
`[E, O, I]` as it lies. Ours for NVFP4 and GGUF blocks (`words`) reads words, `[E, words, O]`.

XLA's `ragged_dot` wants the inputs ahead of the outputs, and copies all weights into that order at each call. Only `small` and
`words` import Pallas, and only programs for TPUs import them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.grouped_matmul.tuning import load, of_rows
from jaxserve_kernels.matmul import tpu as dense

Operand = jax.Array | jax.ShapeDtypeStruct
LANES = 128
_SUBLANES = 16
_GROUPS = (32, 64, 128)
"""Inputs that a scale of weights in groups may belong to."""
_BLOCKS = (16, 32)
"""Inputs that an exponent of MXFP4 may belong to."""
_GROUPS_OF_STEP = 8
"""Scales of a step fill the rows of a tile of memory, or they are all there are."""


@dataclass(frozen=True, slots=True)
class SmallTuning:
    """Sizes of the kernel for weights of 8 and 4 bits."""

    rows: int
    """Rows of a tile: a multiple of 32."""
    outputs: int
    """Outputs of a block."""
    inputs: int
    """Inputs of a step; in the table, the most."""


def supports(x: jax.Array, weight: jax.Array) -> bool:
    """Return True if the kernel for float weights computes this matmul."""
    num_outputs, num_inputs = weight.shape[1:]
    return x.dtype == weight.dtype == jnp.bfloat16 and num_outputs % LANES == num_inputs % LANES == 0


def small_choice(x: Operand, weight: Operand, scales: Operand) -> SmallTuning | None:
    """Return the sizes for 8-bit weights with a scale per output, or 4-bit and e4m3 ones with one per output and group of
    inputs, of MXFP4 an exponent; None: the reference computes it. The sizes are not measured; see README."""
    (num_rows, num_inputs), num_experts = x.shape, weight.shape[0]
    unit, bits = LANES, 8
    if len(scales.shape) == 3:
        group, bits = num_inputs // scales.shape[1], 4 if weight.dtype == jnp.int4 else 8
        unit = group * _GROUPS_OF_STEP
        of_scales = (jnp.bfloat16, jnp.float32) if bits == 4 else (jnp.float32,)
        is_scaled = scales.dtype in of_scales and group in _GROUPS
        is_mxfp4 = bits == 4 and scales.dtype == jnp.uint8 and group in _BLOCKS
        is_known = (weight.dtype in (jnp.int4, jnp.float8_e4m3fn) and is_scaled) or is_mxfp4
    else:
        is_known = weight.dtype in (jnp.int8, jnp.float8_e4m3fn) and scales.dtype == jnp.float32
    if x.dtype != jnp.bfloat16 or not is_known:
        return None
    sizes = SmallTuning(**of_rows(load("tpu")[f"{bits} bits"], num_rows // num_experts))
    inputs = _step(num_inputs, sizes.inputs, unit)
    return None if inputs is None else replace(sizes, inputs=inputs)


def words_choice(x: Operand, words: Operand, scales: Operand | None = None) -> dense.WordsTuning | None:
    """Return the sizes for weights in words, with e4m3 scales beside those of NVFP4; None: the reference computes it. The sizes are not
    measured; see README."""
    num_experts, num_words, num_outputs = words.shape
    found = dense.words_choice(x, num_outputs, 4 * num_words + (0 if scales is None else scales.shape[1]))
    most_rows = of_rows(load("tpu")["words"], x.shape[0] // num_experts)["rows"]
    return None if found is None else replace(found, rows=min(found.rows, most_rows))


def _step(num_inputs: int, most: int, unit: int) -> int | None:
    """Inputs of a step: all, or as many of these units as divide them."""
    if num_inputs <= most:
        return num_inputs
    return next((size for size in range(most // unit * unit, 0, -unit) if num_inputs % size == 0), None)


def in_device_memory(weight: Array) -> Array:
    """Return the weights of experts as an operand that a kernel reads from HBM.

    Otherwise XLA may copy those of all experts into VMEM while it computes another layer, and the kernel needs a few of them.
    """
    from jax.experimental.pallas.tpu import HBM, with_memory_space_constraint  # imports Pallas

    constrained: Array = with_memory_space_constraint(weight, HBM)
    return constrained


def grouped_matmul(
    x: Float[Array, "R I"], weight: Float[Array, "E O I"], group_sizes: Int[Array, "E"], *, is_emulated: bool = False
) -> Float[Array, "R O"]:
    """See `api.grouped_matmul`; of float weights."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # imports Pallas

    sizes, (num_rows, num_inputs), num_outputs = load("tpu")["16 bits"], x.shape, weight.shape[1]
    rows = min(sizes["rows"], -(-num_rows // _SUBLANES) * _SUBLANES)
    inputs = next(each for each in sizes["inputs"] if num_inputs % each == 0)
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    result: Array = gmm(
        padded,
        weight if is_emulated else in_device_memory(weight),
        group_sizes,
        tiling=(rows, inputs, min(sizes["outputs"], num_outputs)),
        transpose_rhs=True,
        interpret=is_emulated,
    )
    return result[:num_rows]
