"""Public entry of block_matmul. Letters: T tokens, I inputs, O outputs, R tiles of 16 outputs, B blocks, Y bytes."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, UInt8

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.block_kinds import BlockKind
from jaxserve_kernels.block_matmul import cpu, gpu, reference
from jaxserve_kernels.block_matmul.reference import dequantize_rows, dequantize_tiles

__all__ = ["block_matmul", "dequantize_rows", "dequantize_tiles"]


def block_matmul(
    x: Float[Array, "T I"],
    tiles: UInt8[Array, "R B Y"],
    num_rows: Int[Array, ""] | None = None,
    *,
    kind: BlockKind,
    dynamic: bool = False,
    backend: Backend = "reference",
) -> Float[Array, "T O"]:
    """x @ weight.T in float32, with weights in the layout of `block_kinds`.

    num_rows: rows of x after these are padding, whose results have no meaning; a backend may skip them.
    dynamic: activations are rounded to int8, every 32 neighbours of a token by their largest value. Otherwise weights are
    multiplied as they dequantise. A row's result does not depend on its neighbours in the native kernels.
    """
    if backend in NATIVE and cpu.is_built():
        return cpu.block_matmul(x, tiles, num_rows, kind=kind, dynamic=dynamic)
    tuned = gpu.choice(x, tiles, kind) if backend == "mosaic_gpu" else None
    if tuned is not None:
        from jaxserve_kernels.block_matmul.gpu import skinny  # imports Pallas

        rounded = reference.round_inputs(x) if dynamic else x
        product: Array = skinny.block_matmul(rounded, tiles, kind=kind, tuning=tuned)
        return product
    return reference.block_matmul(x, tiles, kind=kind, dynamic=dynamic)
