"""The dtypes a model is stored and computed in, and its kernels: decided once, static in every program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxserve_kernels.backend import NATIVE, Backend

from jaxserve.quant.array import Axes, MatrixSpec
from jaxserve.quant.policy import QuantPolicy
from jaxserve.sharding.rules import AxisRules, MeshShape

Exchange = Literal["auto", "all-to-all", "all-reduce"]
KVScaleKind = Literal["heads", "numbers"]
"""Scales of a layer's keys, and of its values.

heads: one for each KV head, from the checkpoint; numbers: one for each number of each head, measured as the weights are loaded."""


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """Dtypes, quantisation and kernels of one engine."""

    weights: jnp.dtype
    """Dtype of matrices that are not quantised."""
    activations: jnp.dtype
    """Dtype between layers; matmuls accumulate in float32."""
    quant: QuantPolicy = QuantPolicy()
    backend: Backend = "reference"
    """Implementation of matmuls, and of attention if `attention` is None."""
    attention: Backend | None = None
    """Implementation of attention in a model whose layers `backend` has no attention kernel for."""
    fused_for: int = 0
    """Devices for which QKV and gate-up projections are laid out as one matrix each; 0: they are not fused."""
    mesh: MeshShape = MeshShape()
    """Devices that share the layers."""
    kv_scales: KVScaleKind | None = None
    """Scales of the numbers in an 8-bit KV cache; None: there are none, and numbers are keys and values themselves."""
    exchange: Exchange = "auto"
    """Collectives between tokens and experts on other devices: see `expert_parallel`."""
    rules: AxisRules = AxisRules()
    """Mesh axes that split each logical axis; `make_skeleton` finds them."""

    @property
    def attention_backend(self) -> Backend:
        """Implementation of attention."""
        return self.backend if self.attention is None else self.attention

    @property
    def vectors(self) -> jnp.dtype:
        """Dtype of norms and biases: small, and never quantised."""
        return self.activations

    @property
    def matrices(self) -> jnp.dtype:
        """Dtype of the values of quantised matrices, or of weights."""
        return self.quant.format.values_dtype(self.weights, self.quant.platform)

    @property
    def is_native(self) -> bool:
        """True if native CPU kernels compute all matmuls."""
        return self.backend in NATIVE and self.quant.format.has_native_matmul(self.weights)

    @property
    def for_tables(self) -> DtypePolicy:
        """The policy of embedding tables and output heads."""
        found = self.quant.format.for_tables(is_stored=self.quant.is_stored)
        return replace(self, quant=replace(self.quant, name=found.name))

    @property
    def unquantized(self) -> DtypePolicy:
        """The policy of matrices that are never quantised."""
        return replace(self, quant=QuantPolicy())

    def matrix(self, out_dim: int, in_dim: int, axes: Axes, num_experts: int | None = None) -> MatrixSpec:
        """Describe a matrix to the format that stores it."""
        return MatrixSpec(
            out_dim,
            in_dim,
            axes,
            self.weights,
            self.activations,
            num_experts,
            num_input_shards=self.rules.count(axes[1]),
            num_output_shards=self.rules.count(axes[0]),
            group_size=self.quant.group_size,
            has_offsets=self.quant.has_offsets,
            platform=self.quant.platform,
        )


def plain(dtype: jnp.dtype, quantization: str = "none") -> DtypePolicy:
    """Return the policy of one dtype for everything that is not quantised, computed by XLA alone."""
    return DtypePolicy(jnp.dtype(dtype), jnp.dtype(dtype), QuantPolicy(quantization))
