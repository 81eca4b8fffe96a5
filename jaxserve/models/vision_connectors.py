"""Connectors of vision towers: from the patches of a block to one embedding of the decoder's width. See `Connector`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
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
        bias = config.connector == "biased_linear"
        self.proj = Linear(config.output_size, config.block * config.hidden_size, (None, None), policy, bias=bias)
        self.block = config.block

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        return self.proj(x.reshape(len(x) // self.block, -1), Tokens(num_rows))


class MLPConnector(nnx.Module):
    """Two layers over the normalised vectors of a block, and perhaps a matrix. is_joint: the vectors of a block are normalised together."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy, *, is_joint: bool = False) -> None:
        d = config.block * config.hidden_size
        make = RMSNorm if config.connector in ("rms_mlp", "rms_mlp_linear") else LayerNorm
        width = None if is_joint or config.connector != "rms_mlp_linear" else config.connector_width
        inner = d if is_joint or config.connector != "mlp" else config.connector_width or d
        self.norm = make(d if is_joint else config.hidden_size, config.connector_eps, policy)
        self.linear_fc1 = Linear(inner, d, (None, None), policy, bias=True)
        self.linear_fc2 = Linear(width or config.output_size, inner, (None, None), policy, bias=True)
        self.proj = None if width is None else Linear(config.output_size, width, (None, None), policy, bias=True)
        self.block, self.is_joint, self.scale = config.block, is_joint, config.connector_scale

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        shape, tokens = (len(x) // self.block, -1), Tokens(num_rows)
        x = self.norm(x.reshape(shape)) if self.is_joint else self.norm(x).reshape(shape)
        x = self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x, tokens)), tokens)
        return x if self.proj is None else self.proj(x, tokens) * self.scale


class ProjectorConnector(nnx.Module):
    """Two layers over the vectors of a block, which one matrix may join before, or a LayerNorm normalise, each or together, or over their
    mean."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, o, self.block = config.feature_width, config.output_size, config.block
        width = config.connector_width or o
        is_merged, bias = config.connector == "merged_projector", config.has_connector_biases
        self.norms_patches = config.connector == "patch_normed_projector"
        self.norm = _projector_norm(config, policy)
        self.merging_layer = Linear(d, config.block * d, (None, None), policy) if is_merged else None
        self.is_mean = config.connector == "mean_projector"
        inputs = d if is_merged or self.is_mean else config.block * d
        self.linear_1 = Linear(width, inputs, (None, None), policy, bias=bias)
        self.linear_2 = Linear(o, width, (None, None), policy, bias=bias)
        self.activation = config.connector_activation

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        tokens, count = Tokens(num_rows), len(x) // self.block
        if self.is_mean:
            x = _means(x, self.block)
        elif self.norm is not None and self.merging_layer is None:
            x = self.norm(x if self.norms_patches else x.reshape(count, -1))
        elif self.norm is not None and self.merging_layer is not None:
            # Inputs of the matrix are in the order of channels, then patches.
            x = self.norm(x).reshape(count, self.block, -1).swapaxes(1, 2)
            x = self.merging_layer(x.reshape(count, -1), tokens)
        x = self.linear_1(x.reshape(count, -1), tokens)
        return self.linear_2(ACTIVATIONS[self.activation](x), tokens)


def _projector_norm(config: VisionConfig, policy: DtypePolicy) -> RMSNorm | LayerNorm | None:
    match config.connector:
        case "merged_projector":
            return RMSNorm(config.hidden_size, config.connector_eps, policy)
        case "patch_normed_projector":
            return LayerNorm(config.hidden_size, config.connector_eps, policy)
        case "normed_projector":
            return LayerNorm(config.block * config.feature_width, config.connector_eps, policy)
    return None


class Downsample(nnx.Module):
    """One matrix with a bias over the vectors of a block, stored as a convolution whose stride is its size."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        shape = (config.output_size, config.hidden_size, config.merge, config.merge)
        self.weight = parameter(shape, (None,) * 4, policy.weights)
        self.bias = parameter(shape[:1], (None,), policy.vectors)

    def __call__(self, x: Float[Array, "N B D"]) -> Float[Array, "N O"]:
        kernel = self.weight[...].astype(x.dtype)
        kernel = kernel.reshape(*kernel.shape[:2], -1)
        made = jnp.einsum("nbd,odb->no", x, kernel, preferred_element_type=jnp.float32)
        return made.astype(x.dtype) + self.bias[...]


class DownsampledConnector(nnx.Module):
    """One matrix over the vectors of a block, another one, a LayerNorm, and a feed-forward block with a gate."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        o, width, self.block = config.output_size, config.connector_width, config.block
        assert width is not None, "a connector with a feed-forward block"
        self.downsample = Downsample(config, policy)
        self.proj = Linear(o, o, (None, None), policy)
        self.post_projection_norm = LayerNorm(o, config.connector_eps, policy)
        self.gate_proj = Linear(width, o, (None, None), policy)
        self.up_proj = Linear(width, o, (None, None), policy)
        self.down_proj = Linear(o, width, (None, None), policy)
        self.activation = config.connector_activation

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        tokens = Tokens(num_rows)
        x = self.proj(self.downsample(x.reshape(len(x) // self.block, self.block, -1)), tokens)
        x = ACTIVATIONS["gelu"](self.post_projection_norm(x))
        gate = ACTIVATIONS[self.activation](self.gate_proj(x, tokens))
        return self.down_proj(gate * self.up_proj(x, tokens), tokens)


class GatedConnector(nnx.Module):
    """Two layers over the vectors of a block, which a LayerNorm may normalise together; the second one reads half of the first one's outputs
    times an activation of the other half."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        width, self.block = config.connector_width, config.block
        assert width is not None, "a connector with layers of a width of their own"
        joint, is_normed = config.block * config.hidden_size, config.connector == "normed_gated_projector"
        self.norm = LayerNorm(joint, config.connector_eps, policy) if is_normed else None
        self.linear_1 = Linear(width, joint, (None, None), policy, bias=True)
        self.linear_2 = Linear(config.output_size, width // 2, (None, None), policy, bias=True)
        self.activation = config.connector_activation

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        tokens = Tokens(num_rows)
        x = x.reshape(len(x) // self.block, -1)
        up, gate = jnp.split(self.linear_1(x if self.norm is None else self.norm(x), tokens), 2, axis=-1)
        return self.linear_2(up * ACTIVATIONS[self.activation](gate), tokens)


class ActivatedConnector(nnx.Module):
    """Two layers over the vectors of a block, an activation after each, one matrix, and perhaps an RMSNorm without weights."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        width, self.block = config.connector_width, config.block
        assert width is not None, "a connector with layers of a width of their own"
        self.fc1 = Linear(width, config.block * config.hidden_size, (None, None), policy)
        self.fc2 = Linear(width, width, (None, None), policy)
        self.linear_1 = Linear(config.output_size, width, (None, None), policy)
        self.activation, self.eps = config.connector_activation, config.connector_eps
        self.is_normed, self.is_alike = config.connector == "activated_normed", policy.backend in NATIVE

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        tokens, activation = Tokens(num_rows), ACTIVATIONS[self.activation]
        x = x.reshape(len(x) // self.block, self.block, -1)
        x = (x.swapaxes(1, 2) if self.is_normed else x).reshape(len(x), -1)
        x = self.linear_1(activation(self.fc2(activation(self.fc1(x, tokens)), tokens)), tokens)
        return normalized(x, self.eps, is_alike=self.is_alike).astype(x.dtype) if self.is_normed else x


class AverageConnector(nnx.Module):
    """One matrix over the normalised mean of a block. Stored as inputs by outputs."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        self.mm_soft_emb_norm = RMSNorm(config.hidden_size, config.connector_eps, policy, "offset")
        self.mm_input_projection_weight = parameter(
            (config.hidden_size, config.output_size), (None, None), policy.weights
        )
        self.block = config.block

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        means = _means(x, self.block)
        weight, normed = self.mm_input_projection_weight[...].astype(x.dtype), self.mm_soft_emb_norm(means)
        return jnp.einsum("nd,do->no", normed, weight, preferred_element_type=jnp.float32).astype(x.dtype)


class ScaledAverageConnector(nnx.Module):
    """One matrix over the normalised mean of a block, which may be multiplied by sqrt(D) and standardised before."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        self.std_bias = parameter((d,), (None,), policy.vectors) if config.is_standardized else None
        self.std_scale = parameter((d,), (None,), policy.vectors) if config.is_standardized else None
        self.embedding_projection = Linear(config.output_size, d, (None, None), policy)
        self.block, self.eps, self.is_alike = config.block, config.connector_eps, policy.backend in NATIVE
        self.scale = 1.0 if config.connector == "normed" else d**0.5

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        means = _means(x, self.block)
        # Standardising subtracts large numbers from each other, so it stays in float32.
        wide = means.astype(jnp.float32) * self.scale
        if self.std_bias is not None and self.std_scale is not None:
            wide = (wide - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        normed = normalized(wide.astype(x.dtype), self.eps, is_alike=self.is_alike).astype(x.dtype)
        return self.embedding_projection(normed, Tokens(num_rows))


class PlacedConnector(nnx.Module):
    """One matrix over the normalised vectors of a block, a fixed vector for the block's place, and another matrix between norms. All
    images have the same size."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, o, self.block, eps = config.hidden_size, config.output_size, config.block, config.connector_eps
        assert config.image_patches is not None, "images of one size"
        self.ln_in, self.ln_mid, self.ln_out = (
            LayerNorm(d, eps, policy),
            LayerNorm(o, eps, policy),
            LayerNorm(o, eps, policy),
        )
        self.proj = Linear(o, config.block * d, (None, None), policy)
        self.mlp_fc2 = Linear(o, o, (None, None), policy)
        self.num_places, self.width = config.image_patches // config.block, o
        self.scale, self.activation = config.connector_scale, config.connector_activation

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        tokens, count = Tokens(num_rows), len(x) // self.block
        x = self.proj(self.ln_in(x).reshape(count, -1), tokens)
        places = jnp.asarray(_waves(self.num_places, self.width), x.dtype)
        x = x + places[jnp.arange(count) % self.num_places]
        x = self.mlp_fc2(ACTIVATIONS[self.activation](self.ln_mid(x)), tokens)
        return self.ln_out(x) * self.scale


def _means(x: Float[Array, "P D"], block: int) -> Float[Array, "N D"]:
    """Return the mean of the vectors of each block."""
    return x.astype(jnp.float32).reshape(len(x) // block, block, -1).mean(1).astype(x.dtype)


def _waves(count: int, width: int) -> np.ndarray:
    """Return (count, width): sines and cosines of the column, then of the row, of each place of a square grid."""
    side, quarter = math.isqrt(count), width // 4
    frequencies = 1 / 10_000 ** (np.arange(quarter) / quarter)
    rows, columns = np.indices((side, side)).reshape(2, -1, 1) * frequencies
    return np.concatenate([np.sin(columns), np.cos(columns), np.sin(rows), np.cos(rows)], axis=1).astype(np.float32)


class TableConnector(nnx.Module):
    """The mean of the rows of a table but the last ones, `marks`; its shares are computed by one matrix over the vectors of a block."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        size, self.block = config.connector_width, config.block
        assert size is not None, "a connector with a table"
        self.num_rows = size - config.num_marks
        self.head_linear = Linear(self.num_rows, config.block * config.hidden_size, (None, None), policy)
        self.head_norm = LayerNorm(self.num_rows, config.connector_eps, policy)
        self.table = Embeddings(size, config, policy)
        self.has_one_share = config.has_one_share

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        scores = self.head_norm(self.head_linear(x.reshape(len(x) // self.block, -1), Tokens(num_rows)))
        rows = self.table.weight[...][: self.num_rows]
        if self.has_one_share:
            return rows[scores.argmax(-1)].astype(x.dtype)
        shares = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(x.dtype)
        return jnp.einsum("nv,vo->no", shares, rows.astype(x.dtype), preferred_element_type=jnp.float32).astype(x.dtype)

    @property
    def marks(self) -> Float[Array, "M O"]:
        """Learned vectors of their own."""
        return self.table.weight[...][self.num_rows :]


class Embeddings(nnx.Module):
    """A table with a row of the decoder's width for each number."""

    def __init__(self, size: int, config: VisionConfig, policy: DtypePolicy) -> None:
        self.weight = parameter((size, config.output_size), (None, None), policy.weights)


AnyConnector = (
    LinearConnector
    | MLPConnector
    | ProjectorConnector
    | AverageConnector
    | ScaledAverageConnector
    | ActivatedConnector
    | GatedConnector
    | DownsampledConnector
    | PlacedConnector
    | TableConnector
)
_CONNECTORS: Final[Mapping[Connector, type[AnyConnector]]] = {
    "linear": LinearConnector,
    "biased_linear": LinearConnector,
    "mlp": MLPConnector,
    "rms_mlp": MLPConnector,
    "rms_mlp_linear": MLPConnector,
    "projector": ProjectorConnector,
    "mean_projector": ProjectorConnector,
    "normed_projector": ProjectorConnector,
    "patch_normed_projector": ProjectorConnector,
    "merged_projector": ProjectorConnector,
    "average": AverageConnector,
    "scaled_average": ScaledAverageConnector,
    "normed": ScaledAverageConnector,
    "activated": ActivatedConnector,
    "activated_normed": ActivatedConnector,
    "gated_projector": GatedConnector,
    "normed_gated_projector": GatedConnector,
    "downsampled": DownsampledConnector,
    "placed": PlacedConnector,
    "tabled": TableConnector,
}


def make_connector(config: VisionConfig, policy: DtypePolicy) -> AnyConnector:
    """Return the connector of a tower."""
    return _CONNECTORS[config.connector](config, policy)


def make_deepstack_connector(config: VisionConfig, policy: DtypePolicy) -> AnyConnector:
    """Return the connector of a deepstack layer."""
    if config.deepstack_connector == "mlp":
        return MLPConnector(config, policy, is_joint=True)
    return make_connector(replace(config, connector=config.deepstack_connector), policy)
