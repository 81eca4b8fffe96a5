"""Connectors of vision towers: from the patches of a block to one embedding of the decoder's width. See `Connector`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm, RMSNorm, normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.vision import Connector, VisionConfig


class LinearConnector(nnx.Module):
    """One matrix over the vectors of a block side by side."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        self.proj = Linear(config.output_size, config.block * config.hidden_size, (None, None), policy)
        self.block = config.block

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        return self.proj(x.reshape(len(x) // self.block, -1), Tokens(num_rows))


class MLPConnector(nnx.Module):
    """Two layers over the normalised vectors of a block. is_joint: the vectors of a block are normalised together."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy, *, is_joint: bool = False) -> None:
        d = config.block * config.hidden_size
        make = RMSNorm if config.connector == "rms_mlp" else LayerNorm
        self.norm = make(d if is_joint else config.hidden_size, config.connector_eps, policy)
        self.linear_fc1 = Linear(d, d, (None, None), policy, bias=True)
        self.linear_fc2 = Linear(config.output_size, d, (None, None), policy, bias=True)
        self.block, self.is_joint = config.block, is_joint

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        shape, tokens = (len(x) // self.block, -1), Tokens(num_rows)
        x = self.norm(x.reshape(shape)) if self.is_joint else self.norm(x).reshape(shape)
        return self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x, tokens)), tokens)


class ProjectorConnector(nnx.Module):
    """Two layers over the vectors of a block, which one matrix may join before."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, o, self.block = config.hidden_size, config.output_size, config.block
        is_merged, bias = config.connector == "merged_projector", config.has_connector_biases
        self.norm = RMSNorm(d, config.connector_eps, policy) if is_merged else None
        self.merging_layer = Linear(d, config.block * d, (None, None), policy) if is_merged else None
        self.linear_1 = Linear(o, d if is_merged else config.block * d, (None, None), policy, bias=bias)
        self.linear_2 = Linear(o, o, (None, None), policy, bias=bias)
        self.activation = config.connector_activation

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        tokens, count = Tokens(num_rows), len(x) // self.block
        if self.norm is not None and self.merging_layer is not None:
            # Inputs of the matrix are in the order of channels, then patches.
            x = self.norm(x).reshape(count, self.block, -1).swapaxes(1, 2)
            x = self.merging_layer(x.reshape(count, -1), tokens)
        x = self.linear_1(x.reshape(count, -1), tokens)
        return self.linear_2(ACTIVATIONS[self.activation](x), tokens)


class AverageConnector(nnx.Module):
    """One matrix over the normalised mean of a block. Stored as inputs by outputs."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        self.mm_soft_emb_norm = RMSNorm(config.hidden_size, config.connector_eps, policy, "offset")
        self.mm_input_projection_weight = parameter(
            (config.hidden_size, config.output_size), (None, None), policy.weights
        )
        self.block = config.block

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        means = x.astype(jnp.float32).reshape(len(x) // self.block, self.block, -1).mean(1).astype(x.dtype)
        weight, normed = self.mm_input_projection_weight[...].astype(x.dtype), self.mm_soft_emb_norm(means)
        return jnp.einsum("nd,do->no", normed, weight, preferred_element_type=jnp.float32).astype(x.dtype)


class ScaledAverageConnector(nnx.Module):
    """One matrix over the normalised mean of a block times sqrt(D), which may be standardised before."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        self.std_bias = parameter((d,), (None,), policy.vectors) if config.is_standardized else None
        self.std_scale = parameter((d,), (None,), policy.vectors) if config.is_standardized else None
        self.embedding_projection = Linear(config.output_size, d, (None, None), policy)
        self.block, self.eps, self.is_alike = config.block, config.connector_eps, policy.backend in NATIVE

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        means = x.astype(jnp.float32).reshape(len(x) // self.block, self.block, -1).mean(1).astype(x.dtype)
        # Standardising subtracts large numbers from each other, so it stays in float32.
        wide = means.astype(jnp.float32) * x.shape[1] ** 0.5
        if self.std_bias is not None and self.std_scale is not None:
            wide = (wide - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        normed = normalized(wide.astype(x.dtype), self.eps, is_alike=self.is_alike).astype(x.dtype)
        return self.embedding_projection(normed, Tokens(num_rows))


AnyConnector = LinearConnector | MLPConnector | ProjectorConnector | AverageConnector | ScaledAverageConnector
_CONNECTORS: Final[Mapping[Connector, type[AnyConnector]]] = {
    "linear": LinearConnector,
    "mlp": MLPConnector,
    "rms_mlp": MLPConnector,
    "projector": ProjectorConnector,
    "merged_projector": ProjectorConnector,
    "average": AverageConnector,
    "scaled_average": ScaledAverageConnector,
}


def make_connector(config: VisionConfig, policy: DtypePolicy) -> AnyConnector:
    """Return the connector of a tower."""
    return _CONNECTORS[config.connector](config, policy)
