"""In which types a model is stored and computed, and by which kernels: decided once, static in every program."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxserve_kernels.backend import Backend

from jaxserve.config import Quantization


@dataclass(frozen=True, slots=True)
class Numerics:
    """The packing plan of one backend.

    weights      of matrices, unless they are quantised
    activations  between layers; products are accumulated in float32 whatever they are
    quantization int8: weights and activations, int8-weight-only: weights; one scale per output
    backend      of products and attention
    """

    weights: jnp.dtype
    activations: jnp.dtype
    quantization: Quantization = "none"
    backend: Backend = "reference"

    @property
    def vectors(self) -> jnp.dtype:
        """Of norms and biases: small, and never quantised."""
        return self.activations

    @property
    def is_int8(self) -> bool:
        """Whether matrices are stored as int8 with scales."""
        return self.quantization != "none"


def plain(dtype: jnp.dtype) -> Numerics:
    """Everything in one type, by XLA alone."""
    return Numerics(jnp.dtype(dtype), jnp.dtype(dtype))
