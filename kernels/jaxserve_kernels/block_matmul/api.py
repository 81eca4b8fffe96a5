"""Public entry of block_matmul. Letters: T tokens, I inputs, O outputs, R tiles of 16 outputs, B blocks, Y bytes, W words."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.block_kinds import BlockKind
from jaxserve_kernels.block_matmul import cpu, gpu, reference, tpu
from jaxserve_kernels.block_matmul.reference import Blocks, dequantize, dequantize_rows, dequantize_tiles

__all__ = ["block_matmul", "dequantize", "dequantize_rows", "dequantize_tiles"]


def block_matmul(
    x: Float[Array, "T I"],
    blocks: Blocks,
    num_rows: Int[Array, ""] | None = None,
    *,
    kind: BlockKind,
    dynamic: bool = False,
    backend: Backend = "reference",
) -> Float[Array, "T O"]:
    """x @ weight.T in float32, with weights in the layout of `block_kinds`, or of `tpu_words` as devices of their own have it.

    num_rows: rows of x after these are padding, whose results have no meaning; a backend may skip them.
    dynamic: activations are rounded to int8, every 32 neighbours of a token by their largest value. Otherwise weights are
    multiplied as they dequantise. A row's result does not depend on its neighbours in the native kernels.
    """
    if reference.are_words(blocks):
        return _with_words(x, blocks, kind=kind, dynamic=dynamic, backend=backend)
    if backend in NATIVE and cpu.is_built():
        return cpu.block_matmul(x, blocks, num_rows, kind=kind, dynamic=dynamic)
    tuned = gpu.choice(x, blocks, kind) if backend == "mosaic_gpu" else None
    if tuned is not None:
        from jaxserve_kernels.block_matmul.gpu import skinny  # imports Pallas

        rounded = reference.round_inputs(x) if dynamic else x
        product: Array = skinny.block_matmul(rounded, blocks, kind=kind, tuning=tuned)
        return product
    return reference.block_matmul(x, blocks, kind=kind, dynamic=dynamic)


def _with_words(
    x: Float[Array, "T I"], words: Int[Array, "W O"], *, kind: BlockKind, dynamic: bool, backend: Backend
) -> Float[Array, "T O"]:
    tuned = tpu.choice(x, words) if backend == "mosaic_tpu" else None
    if tuned is None:
        return reference.block_matmul(x, words, kind=kind, dynamic=dynamic)
    from jaxserve_kernels.block_matmul.tpu import kernel  # imports Pallas

    rounded = reference.round_inputs(x) if dynamic else x
    product: Array = kernel.block_matmul(rounded, words, kind=kind, tuning=tuned)
    return product
