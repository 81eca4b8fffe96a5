"""In which types a model is stored and computed, and by which kernels: decided once, static in every program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import jax.numpy as jnp
from jaxserve_kernels.backend import Backend

from jaxserve.config import WeightFormat

GROUP_SIZES: Final = (128, 64, 32)
"""Inputs that share a scale, where weights have 4 bits."""


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """The packing plan of one backend.

    weights      of matrices, unless they are quantised
    activations  between layers; products are accumulated in float32 whatever they are
    quantization of matrices, with one scale per output; int8 and fp8 quantise activations as well, one scale per token;
                 int4 has one for each output and group of inputs
    backend      of products and attention
    plain_matrices  modules that are not quantised, by their names in checkpoints, nor is what they are joined with
    fused_for   this many devices, products of one input are computed as one; 0: one by one
    group_size   inputs of a group, or a multiple of them
    has_offsets  whether groups of 4-bit weights have an offset as well
    num_devices  that share a layer: where they split inputs, no group is on two of them
    split_axes   what they share, by the names of parameters' axes; `make_skeleton` finds it
    four_bits    what a number of 4 bits is stored in
    """

    weights: jnp.dtype
    activations: jnp.dtype
    quantization: WeightFormat = "none"
    backend: Backend = "reference"
    plain_matrices: tuple[str, ...] = ()
    fused_for: int = 0
    group_size: int = GROUP_SIZES[0]
    has_offsets: bool = False
    num_devices: int = 1
    split_axes: tuple[str, ...] = ()
    four_bits: jnp.dtype = jnp.dtype("int4")

    @property
    def vectors(self) -> jnp.dtype:
        """Of norms and biases: small, and never quantised."""
        return self.activations

    @property
    def is_quantized(self) -> bool:
        """Whether matrices are stored in 8 or 4 bits with scales."""
        return self.quantization != "none"

    @property
    def is_dynamic(self) -> bool:
        """Whether activations are quantised before a product, to the type of the weights."""
        return self.quantization in ("int8", "fp8")

    @property
    def matrices(self) -> jnp.dtype:
        """What matrices are stored in."""
        if not self.is_quantized:
            return self.weights
        name, _, _ = self.quantization.partition("-")
        return self.four_bits if name == "int4" else jnp.dtype("float8_e4m3fn" if name == "fp8" else name)

    @property
    def by_outputs(self) -> DtypePolicy:
        """The same with a scale for each output: 8 bits where others have 4."""
        return replace(self, quantization="int8-weight-only") if self.quantization == "int4-weight-only" else self

    def group_of(self, num_inputs: int, *, is_split: bool) -> int | None:
        """Inputs that share a scale; None where no group divides them, or scales belong to outputs.

        is_split: whether devices split the inputs.
        """
        if self.quantization != "int4-weight-only":
            return None
        share = num_inputs // self.num_devices if is_split else num_inputs
        return next((size for size in GROUP_SIZES if self.group_size % size == 0 and share % size == 0), None)


def plain(dtype: jnp.dtype) -> DtypePolicy:
    """Everything in one type, by XLA alone."""
    return DtypePolicy(jnp.dtype(dtype), jnp.dtype(dtype))
