"""Matmuls with dense quantised weights on TPUs: in words by `words`, e4m3 in groups by the kernel for the weights of experts.

XLA for TPUs upcasts weights in words first, and lays e4m3 weights in groups out anew for a matmul by groups, in every step: compiled
for a v6e, three times their bytes. Only the kernels import Pallas, and only programs for TPUs import them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.matmul.tuning import load
from jaxserve_kernels.tpu_words import LANES, UNIT

Operand = jax.Array | jax.ShapeDtypeStruct
_MOST_TOKENS = 256
"""Rows of one tile: the weights are read once."""
_SUBLANES = 16
"""Rows of a tile of memory in 16 bits."""
_LEAST_ROWS = 32


@dataclass(frozen=True, slots=True)
class WordsTuning:
    """Sizes of the kernel for weights in words."""

    rows: int
    """Rows of a tile."""
    outputs: int
    """Outputs of a block."""
    vmem_bytes: int
    """VMEM that the kernel may use."""


def words_choice(x: Operand, num_outputs: int, output_bytes: int) -> WordsTuning | None:
    """Return the sizes for a matmul with weights in words; None: XLA computes it. output_bytes: of an output's weights.

    The sizes are not measured. Rows and weights of a program have all inputs, and are fewer if inputs are many.
    """
    num_rows, num_inputs = x.shape
    if x.dtype != jnp.bfloat16 or num_inputs % UNIT or num_outputs % LANES or is_split():
        return None
    sizes = load("tpu")["words"]
    padded = -(-num_rows // _SUBLANES) * _SUBLANES
    rows = min(padded, _halved(sizes["rows"], _LEAST_ROWS, 2 * num_inputs, sizes["row_bytes"]))
    outputs = min(num_outputs, _halved(sizes["outputs"], LANES, output_bytes, sizes["weight_bytes"]))
    return WordsTuning(rows, outputs, sizes["vmem_bytes"])


def take_columns(words: Int[Array, "W O"], indices: Int[Array, "T"], backend: Backend) -> Int[Array, "W T"]:
    """Return words[:, indices]: of outputs of a table."""
    if backend != "mosaic_tpu" or words.shape[1] % LANES or is_split():
        return words[:, indices]
    from jaxserve_kernels.matmul.tpu.columns import columns  # imports Pallas

    found: Array = columns(words, indices)
    return found


def _halved(most: int, least: int, each_bytes: int, most_bytes: int) -> int:
    """Return how many of so many bytes each fit: `most`, halved as often as needed."""
    while most > least and most * each_bytes > most_bytes:
        most //= 2
    return most


def supports(x: jax.Array, weight: jax.Array, scales: jax.Array) -> bool:
    """Return True if the kernel computes this matmul with weights in groups."""
    from jaxserve_kernels.grouped_matmul import tpu  # imports this package

    if weight.dtype != jnp.float8_e4m3fn or len(x) > _MOST_TOKENS or is_split():
        return False
    return (
        tpu.small_choice(x, *(jax.ShapeDtypeStruct((1, *each.shape), each.dtype) for each in (weight, scales)))
        is not None
    )


def matmul(x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "G O"]) -> Float[Array, "T O"]:
    """See `api.matmul`; shapes: see `supports`."""
    from jaxserve_kernels.grouped_matmul import grouped_matmul

    rows = jnp.full(1, len(x), jnp.int32)
    result: Array = grouped_matmul(x, weight[None], rows, scales[None], backend="mosaic_tpu")
    return result


def is_split() -> bool:
    """Return True if XLA must split this matmul over devices, which it cannot do with a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual
