"""Declarations of parameters: shape, dtype and logical axes; nothing is allocated.

Modules are schema and forward code. Their parameters are built under `nnx.eval_shape`, so a
declaration costs no memory; the loader fills them by their path, which is the checkpoint's name.

Logical axes: "vocab", "embed" (D), "heads" (N*H), "kv_heads" (K*H), "ffn" (F), "experts" (E),
"expert_ffn" (F of each expert), "shared_ffn" (F of the shared expert), None (never split).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxserve.quant.pytree  # noqa: F401  (registers QuantArray)
from jaxserve.quant.array import ArraySpec, QuantArray
from jaxserve.sharding.rules import Axes


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param[jax.Array]:
    """Declare one parameter with a logical name per dimension."""
    if len(shape) != len(axes):
        raise ValueError(f"{len(shape)} dimensions {shape} but {len(axes)} axes {axes}")
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def matrix_parameter(declared: QuantArray[ArraySpec]) -> nnx.Param[QuantArray[jax.Array]]:
    """Declare a weight matrix as its format stores it: one parameter of several arrays."""
    arrays = declared.map(lambda spec: jnp.zeros(spec.shape, spec.dtype))
    return nnx.Param(arrays, axes=declared.map(lambda spec: spec.axes))


def array_axes(parameter: nnx.Variable[Any]) -> tuple[Axes, ...]:
    """Return the logical axes of each array of a parameter."""
    axes = parameter.get_metadata()["axes"]
    return axes.arrays if isinstance(axes, QuantArray) else (axes,)
