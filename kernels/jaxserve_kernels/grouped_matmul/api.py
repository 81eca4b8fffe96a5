"""Public entry of grouped_matmul. Letters: R rows, E experts, I inputs, O outputs, G groups of inputs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.grouped_matmul import cpu, gpu, reference, tpu
from jaxserve_kernels.grouped_matmul.reference import OneLevelScales, Scales, Weight
from jaxserve_kernels.nvfp4 import TwoLevelScales

__all__ = ["grouped_matmul"]


def grouped_matmul(
    x: Float[Array, "R I"],
    weight: Weight,
    group_sizes: Int[Array, "E"],
    scales: Scales = None,
    *,
    dynamic: bool = False,
    backend: Backend = "reference",
) -> Float[Array, "R O"]:
    """x[r] @ weight[e].T, where e is the expert of row r, accumulated and returned in float32.

    Rows come sorted by expert: the first group_sizes[0] belong to expert 0, and so on; results of rows after their sum
    have no meaning. Weights, scales and `dynamic` are those of `matmul`, for each expert; scales of uint8 are the exponents
    of weights in MXFP4, see `mxfp4`, and scales of two levels those of weights in NVFP4, see `nvfp4`. A row's result does
    not depend on its neighbours, and only the weights of experts with rows are read.
    """
    if backend in NATIVE and cpu.supports_float4(x, weight, scales):
        return cpu.float4_matmul(x, weight, group_sizes, scales)
    if isinstance(scales, TwoLevelScales):
        made = _with_two_levels(x, weight, group_sizes, scales, backend)
        if made is not None:
            return made
        return reference.grouped_matmul(x, weight, group_sizes, scales, dynamic=dynamic)
    if backend in NATIVE and cpu.supports(x, weight, scales, dynamic=dynamic):
        return cpu.grouped_matmul(x, weight, group_sizes, scales, dynamic=dynamic, backend=backend)
    if backend == "mosaic_gpu":
        made = _on_gpu(x, weight, group_sizes, scales, dynamic=dynamic)
        if made is not None:
            return made
    if backend == "mosaic_tpu":
        made = _on_tpu(x, weight, group_sizes, scales, dynamic=dynamic)
        if made is not None:
            return made
    return reference.grouped_matmul(x, weight, group_sizes, scales, dynamic=dynamic)


def _on_gpu(
    x: Float[Array, "R I"],
    weight: Weight,
    group_sizes: Int[Array, "E"],
    scales: OneLevelScales,
    *,
    dynamic: bool,
) -> Float[Array, "R O"] | None:
    """By a kernel, where one computes such a matmul."""
    sizes = gpu.choice(x, weight) if scales is None else gpu.small_choice(x, weight, scales, dynamic=dynamic)
    if sizes is None:
        return None
    from jaxserve_kernels.grouped_matmul.gpu import small, whole  # they import Pallas

    result: Array = (
        whole.grouped_matmul(x, weight, group_sizes, tuning=sizes)
        if scales is None
        else small.grouped_matmul(x, weight, group_sizes, scales, dynamic=dynamic, tuning=sizes)
    )
    return result


def _with_two_levels(
    x: Float[Array, "R I"], weight: Weight, group_sizes: Int[Array, "E"], scales: TwoLevelScales, backend: Backend
) -> Float[Array, "R O"] | None:
    """By a kernel of an accelerator, where one computes such a matmul: the scales of matrices are applied to the result."""
    matrix_scale = scales.matrix[:, 0] / scales.matrix[:, 1]
    if backend == "mosaic_gpu" and (sizes := gpu.small_choice(x, weight, scales.blocks)) is not None:
        from jaxserve_kernels.grouped_matmul.gpu import small  # imports Pallas

        made = small.grouped_matmul(x, weight, group_sizes, scales.blocks, tuning=sizes)
        experts = jnp.repeat(jnp.arange(len(weight)), group_sizes, total_repeat_length=len(x))
        scaled: Array = made * matrix_scale[experts]
        return scaled
    if backend == "mosaic_tpu" and reference.are_words(weight):
        of_words = tpu.words_choice(x, weight, scales.blocks)
        if of_words is None:
            return None
        from jaxserve_kernels.grouped_matmul.tpu import words  # imports Pallas
        from jaxserve_kernels.matmul.tpu.words import has_bfloat16

        result: Array = words.grouped_matmul(
            x, weight, group_sizes, scales.blocks, matrix_scale, tuning=of_words, has_bfloat16=has_bfloat16()
        )
        return result
    return None


def _on_tpu(
    x: Float[Array, "R I"],
    weight: Weight,
    group_sizes: Int[Array, "E"],
    scales: OneLevelScales,
    *,
    dynamic: bool,
) -> Float[Array, "R O"] | None:
    """By a kernel, where one computes such a matmul."""
    if scales is None:
        return tpu.grouped_matmul(x, weight, group_sizes) if tpu.supports(x, weight) else None
    sizes = tpu.small_choice(x, weight, scales)
    if sizes is None:
        return None
    from jaxserve_kernels.grouped_matmul.tpu import small  # imports Pallas

    result: Array = small.grouped_matmul(x, weight, group_sizes, scales, dynamic=dynamic, tuning=sizes)
    return result
