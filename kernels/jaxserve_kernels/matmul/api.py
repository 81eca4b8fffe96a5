"""Public entry of matmul. Letters: T tokens, I inputs, O outputs, G groups of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import NATIVE, Backend
from jaxserve_kernels.matmul import cpu, gpu, reference, tpu
from jaxserve_kernels.matmul.cpu import multiplies
from jaxserve_kernels.matmul.reference import offset_matmul, quantize_rows

__all__ = ["matmul", "matmuls", "multiplies", "offset_matmul", "quantize_rows"]


def matmul(
    x: Float[Array, "T I"],
    weight: Num[Array, "O I"],
    scales: Float[Array, "O"] | Float[Array, "G O"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    *,
    dynamic: bool = False,
    backend: Backend = "reference",
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "T O"]:
    """Return x @ weight.T, accumulated in float32 and rounded once to `dtype`.

    8-bit weights (int8, e4m3) come with a scale per output, int4 and e4m3 with one per output and group of inputs; groups are
    neighbours, all of one size. Scales of e4m3 are float32.

    num_rows: rows of x after these are padding, whose results have no meaning; a backend may skip them.
    dynamic: activations are quantised to the type of the 8-bit weights, each token by its own largest value; a matmul of
    int8 by int8 is then exact in int32. Otherwise the weights are upcast.
    """
    if scales is None and backend not in NATIVE and dtype == x.dtype:
        return reference.rounded_matmul(x, weight)
    return _wide_matmul(x, weight, scales, num_rows, dynamic, backend).astype(dtype)


def matmuls(
    x: Float[Array, "T I"],
    weights: Sequence[Num[Array, "_ I"]],
    scales: Sequence[Float[Array, "_"] | Float[Array, "_ _"]] = (),
    num_rows: Int[Array, ""] | None = None,
    *,
    dynamic: bool = False,
    backend: Backend = "reference",
    dtype: DTypeLike = jnp.float32,
) -> list[Float[Array, "T _"]]:
    """Return the `matmul` of x with each weight. The native kernels compute them in one call, in which threads wait for each other once.

    scales: of each weight, in the same order, or none at all.
    """
    is_one_type = len({weight.dtype for weight in weights}) == 1 and all(each.ndim == 1 for each in scales)
    if backend in NATIVE and is_one_type and all(cpu.supports(x, weight, dynamic=dynamic) for weight in weights):
        made = cpu.matmuls(x, weights, scales, num_rows, dynamic=dynamic, backend=backend)
        return [y.astype(dtype) for y in made]
    options: Any = {"dynamic": dynamic, "backend": backend, "dtype": dtype}
    each_scales: Sequence[Array | None] = scales or [None] * len(weights)
    return [matmul(x, w, s, num_rows, **options) for w, s in zip(weights, each_scales, strict=True)]


def _wide_matmul(
    x: Float[Array, "T I"],
    weight: Num[Array, "O I"],
    scales: Float[Array, "O"] | Float[Array, "G O"] | None,
    num_rows: Int[Array, ""] | None,
    dynamic: bool,
    backend: Backend,
) -> Float[Array, "T O"]:
    """Return the result in float32."""
    if scales is not None and scales.ndim == 2:
        return _grouped(x, weight, scales, backend)
    if backend in NATIVE and cpu.supports(x, weight, dynamic=dynamic):
        vectors = () if scales is None else (scales,)
        return cpu.matmuls(x, (weight,), vectors, num_rows, dynamic=dynamic, backend=backend)[0]
    if backend == "mosaic_gpu" and scales is not None:
        tuned = gpu.choice(x, weight, dynamic=dynamic)
        if tuned is not None:
            from jaxserve_kernels.matmul.gpu import skinny  # imports Pallas

            return skinny.scaled_matmul(x, weight, scales, dynamic=dynamic, tuning=tuned)
    return reference.matmul(x, weight, scales, dynamic=dynamic)


def _grouped(
    x: Float[Array, "T I"], weight: Num[Array, "O I"], scales: Float[Array, "G O"], backend: Backend
) -> Float[Array, "T O"]:
    if backend == "mosaic_tpu" and tpu.supports(x, weight, scales):
        return tpu.matmul(x, weight, scales)
    sizes = gpu.grouped_choice(x, weight, scales) if backend == "mosaic_gpu" else None
    if sizes is None:
        return reference.grouped_matmul(x, weight, scales)
    from jaxserve_kernels.matmul.gpu import skinny

    result: jax.Array = skinny.matmul(x, weight, scales, tuning=sizes)
    return result
