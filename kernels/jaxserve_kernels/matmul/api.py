"""Public entry of matmul. Letters: T tokens, I inputs, O outputs."""

from __future__ import annotations

from jaxtyping import Array, Float, Int, Num

from jaxserve_kernels.backend import Backend
from jaxserve_kernels.matmul import cpu, reference
from jaxserve_kernels.matmul.cpu import multiplies_int8
from jaxserve_kernels.matmul.reference import quantize_rows

__all__ = ["matmul", "multiplies_int8", "quantize_rows"]


def matmul(
    x: Float[Array, "T I"],
    weight: Num[Array, "O I"],
    scales: Float[Array, "O"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    *,
    dynamic: bool = False,
    backend: Backend = "reference",
) -> Float[Array, "T O"]:
    """x @ weight.T, accumulated and returned in float32; int8 weights come with a scale per output.

    num_rows: rows of x behind these are padding, whose results mean nothing; a backend may skip them.
    dynamic: int8 weights meet activations that are quantised to int8 as well, each token by its own largest
    value; the product is then exact in int32. Otherwise the weights are widened.
    """
    if backend == "native" and cpu.supports(x, weight, dynamic=dynamic):
        return cpu.matmul(x, weight, scales, num_rows, dynamic=dynamic)
    return reference.matmul(x, weight, scales, dynamic=dynamic)
