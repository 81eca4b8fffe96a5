"""Public entry of block_matmul. Letters: T tokens, E experts, I inputs, O outputs, R tiles of 16 outputs, B blocks, Y bytes, W words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Array, Float, Int, Int32, UInt8

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.block_kinds import BlockKind
from jaxserve_kernels.block_matmul import cpu, gpu, reference, tpu
from jaxserve_kernels.block_matmul.reference import Blocks, ExpertBlocks, dequantize, dequantize_rows, dequantize_tiles

__all__ = ["block_matmul", "block_matmuls", "dequantize", "dequantize_rows", "dequantize_tiles", "grouped_block_matmul"]


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
        return cpu.block_matmuls(x, [blocks], num_rows, kind=kind, dynamic=dynamic)[0]
    tuned = gpu.choice(x, blocks, kind) if backend == "mosaic_gpu" else None
    if tuned is not None:
        from jaxserve_kernels.block_matmul.gpu import skinny  # imports Pallas

        rounded = reference.round_inputs(x) if dynamic else x
        result: Array = skinny.block_matmul(rounded, blocks, kind=kind, tuning=tuned)
        return result
    return reference.block_matmul(x, blocks, kind=kind, dynamic=dynamic)


def block_matmuls(
    x: Float[Array, "T I"],
    blocks: Sequence[UInt8[Array, "_ B Y"] | Int32[Array, "_ _"]],
    num_rows: Int[Array, ""] | None = None,
    *,
    kind: BlockKind,
    dynamic: bool = False,
    backend: Backend = "reference",
) -> list[Float[Array, "T _"]]:
    """Return the `block_matmul` of x with each matrix. The native kernels compute them in one call, in which threads wait for each other once."""
    if backend in NATIVE and cpu.is_built() and not any(reference.are_words(each) for each in blocks):
        return cpu.block_matmuls(x, blocks, num_rows, kind=kind, dynamic=dynamic)
    return [block_matmul(x, each, num_rows, kind=kind, dynamic=dynamic, backend=backend) for each in blocks]


def grouped_block_matmul(
    x: Float[Array, "T I"],
    blocks: ExpertBlocks,
    group_sizes: Int[Array, "E"],
    *,
    kind: BlockKind,
    dynamic: bool = False,
    backend: Backend = "reference",
) -> Float[Array, "T O"]:
    """x[t] @ weight[e].T in float32, where e is the expert of row t: `block_matmul` with a matrix for each expert.

    Rows come sorted by expert, `group_sizes` of each; results of rows after those have no meaning. A row's result does not depend
    on its neighbours, and only the blocks of experts with rows are read.
    """
    if backend in NATIVE and cpu.is_built() and not reference.are_words(blocks):
        return cpu.grouped_block_matmul(x, blocks, group_sizes, kind=kind, dynamic=dynamic)
    kernel = _grouped_kernel(x, blocks, kind, backend)
    if kernel is not None:
        result: Array = kernel(reference.round_inputs(x) if dynamic else x, blocks, group_sizes)
        return result
    return reference.grouped_block_matmul(x, blocks, group_sizes, kind=kind, dynamic=dynamic)


def _grouped_kernel(
    x: Float[Array, "T I"], blocks: ExpertBlocks, kind: BlockKind, backend: Backend
) -> Callable[..., Array] | None:
    """Return the kernel of an accelerator that multiplies with experts' blocks of these sizes; None: there is none."""
    if reference.are_words(blocks):
        of_words = tpu.grouped_choice(x, blocks) if backend == "mosaic_tpu" else None
        if of_words is None:
            return None
        from jaxserve_kernels.block_matmul.tpu import kernel  # imports Pallas

        return partial(kernel.grouped_block_matmul, kind=kind, tuning=of_words)
    of_tiles = gpu.grouped_choice(x, blocks, kind) if backend == "mosaic_gpu" else None
    if of_tiles is None:
        return None
    from jaxserve_kernels.block_matmul.gpu import grouped  # imports Pallas

    return partial(grouped.grouped_block_matmul, kind=kind, tuning=of_tiles)


def _with_words(
    x: Float[Array, "T I"], words: Int[Array, "W O"], *, kind: BlockKind, dynamic: bool, backend: Backend
) -> Float[Array, "T O"]:
    tuned = tpu.choice(x, words) if backend == "mosaic_tpu" else None
    if tuned is None:
        return reference.block_matmul(x, words, kind=kind, dynamic=dynamic)
    from jaxserve_kernels.block_matmul.tpu import kernel  # imports Pallas

    rounded = reference.round_inputs(x) if dynamic else x
    result: Array = kernel.block_matmul(rounded, words, kind=kind, tuning=tuned)
    return result
