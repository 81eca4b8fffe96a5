"""The vision tower: patches of images to embeddings for the decoder, one encoder driven by a `VisionConfig`.

Several images lie side by side on one flat axis of patches, as texts do in a step: attention stays within an image, and
padding follows the last one. Attribute names are the names that `checkpoint/vision_names` gives a checkpoint's tensors.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.rope import Rotation, rotate
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.segment_attention import Texts, attend
from jaxserve.model_config.vision import VisionConfig


class PatchEmbedding(nnx.Module):
    """Compute weight @ patch + bias: a convolution whose stride is its size."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        depth = () if config.num_frames is None else (config.num_frames,)
        kernel = (config.num_channels, *depth, config.patch_size, config.patch_size)
        axes = (None,) * (1 + len(kernel))
        self.weight = parameter((config.hidden_size, *kernel), axes, policy.weights)
        self.bias = parameter((config.hidden_size,), (None,), policy.vectors)
        self.normalization = config.normalization
        self.dtype = policy.activations

    def __call__(self, patches: UInt8[Array, "P F"]) -> Float[Array, "P D"]:
        pixels = patches.astype(jnp.float32).reshape(len(patches), len(self.normalization.means), -1)
        means, deviations = (
            np.asarray(each, np.float32)[:, None] for each in (self.normalization.means, self.normalization.deviations)
        )
        values = (pixels * np.float32(self.normalization.scale) - means) / deviations
        values = values.reshape(patches.shape).astype(self.dtype)
        kernel = self.weight[...]
        if kernel.ndim == 5:  # every frame of an image is the same
            kernel = kernel.astype(jnp.float32).sum(2).astype(kernel.dtype)
        kernel = kernel.reshape(kernel.shape[0], -1).astype(self.dtype)
        made = jnp.einsum("pf,df->pd", values, kernel, preferred_element_type=jnp.float32)
        return made.astype(self.dtype) + self.bias[...]


class PositionTable(nnx.Module):
    """Learned positions, one for each place of a square grid."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        self.side = config.positions_per_side
        self.is_interpolated = config.positions == "interpolated"
        self.weight = parameter((self.side**2, config.hidden_size), (None, None), policy.vectors)

    def __call__(self, positions: Int[Array, "P 2"], sizes: Int[Array, "P 2"], dtype: jnp.dtype) -> Float[Array, "P D"]:
        """Return the position of each patch. sizes: rows and columns of the grid of each patch's image."""
        table = self.weight[...]
        if not self.is_interpolated:
            return table[positions[:, 0] * self.side + positions[:, 1]].astype(dtype)
        # The grid's corners are the table's corners.
        exact = positions * (self.side - 1) / jnp.maximum(sizes - 1, 1)
        low = jnp.floor(exact).astype(jnp.int32)
        high, share = jnp.minimum(low + 1, self.side - 1), exact - low  # (P, 2)
        found = jnp.zeros((len(positions), table.shape[1]), jnp.float32)
        for rows, of_row in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, of_column in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                found += table[rows * self.side + columns] * (of_row * of_column)[:, None]
        return found.astype(dtype)


class VisionAttention(nnx.Module):
    """Attention within each image."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        make = partial(Linear, in_dim=d, axes=(None, None), policy=policy, bias=True)
        self.qkv_proj = FusedLinear({"q_proj": d, "k_proj": d, "v_proj": d}, make, policy, num_units=config.num_heads)
        self.out_proj = Linear(d, d, (None, None), policy, bias=True)
        self.shape = (-1, config.num_heads, config.head_dim)

    def __call__(self, x: Float[Array, "P D"], images: Texts, rotation: Rotation | None) -> Float[Array, "P D"]:
        tokens = Tokens(images.num_tokens)
        query, key, value = (part.reshape(self.shape) for part in self.qkv_proj(x, tokens))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        return self.out_proj(attend(query, key, value, images).reshape(x.shape), tokens)


class VisionMLP(nnx.Module):
    """Compute fc2(activation(fc1(x)))."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, f = config.hidden_size, config.intermediate_size
        self.fc1 = Linear(f, d, (None, None), policy, bias=True)
        self.fc2 = Linear(d, f, (None, None), policy, bias=True)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "P D"], tokens: Tokens) -> Float[Array, "P D"]:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x, tokens)), tokens)


class VisionLayer(nnx.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        self.layer_norm1 = LayerNorm(config.hidden_size, config.norm_eps, policy)
        self.self_attn = VisionAttention(config, policy)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.norm_eps, policy)
        self.mlp = VisionMLP(config, policy)

    def __call__(self, x: Float[Array, "P D"], images: Texts, rotation: Rotation | None) -> Float[Array, "P D"]:
        with jax.named_scope("attention"):
            x = x + self.self_attn(self.layer_norm1(x), images, rotation)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.layer_norm2(x), Tokens(images.num_tokens))


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
        self.norm = LayerNorm(d if is_joint else config.hidden_size, config.connector_eps, policy)
        self.linear_fc1 = Linear(d, d, (None, None), policy, bias=True)
        self.linear_fc2 = Linear(config.output_size, d, (None, None), policy, bias=True)
        self.block, self.is_joint = config.block, is_joint

    def __call__(self, x: Float[Array, "P D"], num_rows: Int[Array, ""]) -> Float[Array, "N O"]:
        shape, tokens = (len(x) // self.block, -1), Tokens(num_rows)
        x = self.norm(x.reshape(shape)) if self.is_joint else self.norm(x).reshape(shape)
        return self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x, tokens)), tokens)


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


_CONNECTORS = {"linear": LinearConnector, "mlp": MLPConnector, "average": AverageConnector}


class VisionTower(nnx.Module):
    """Patches to embeddings of the decoder's width."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        policy = policy.unquantized
        self.config = config
        self.patch_embedding = PatchEmbedding(config, policy)
        self.position_embedding = PositionTable(config, policy)
        self.layers = nnx.List([VisionLayer(config, policy) for _ in range(config.num_layers)])
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps, policy) if config.has_final_norm else None
        self.connector = _CONNECTORS[config.connector](config, policy)
        self.deepstack = nnx.List([MLPConnector(config, policy, is_joint=True) for _ in config.deepstack_layers])

    def encode(
        self, patches: UInt8[Array, "P F"], positions: Int[Array, "P 2"], image_ids: Int[Array, "P"]
    ) -> Float[Array, "N W"]:
        """Return an output row for each block of `merge` ** 2 patches: see `VisionConfig.row_width`.

        positions: row and column of each patch in its image. image_ids: a number from 0 to P - 1 for each image's patches,
        which lie side by side; -1 for padding, which comes last. Rows of padding have no meaning.
        """
        config, count = self.config, len(patches)
        num_real = (image_ids >= 0).sum(dtype=jnp.int32)
        # Padding is one more image: no number of patches is 0.
        images = Texts(jnp.where(image_ids < 0, count, image_ids), num_real, min(config.image_patches or count, count))
        sizes = 1 + jax.ops.segment_max(positions, images.rows, count + 1)[images.rows]  # (P, 2)
        rotation = _rotation(config, positions)
        with jax.named_scope("embed"):
            x = self.patch_embedding(patches)
            x = x + self.position_embedding(positions, sizes, x.dtype)
        num_rows, features = num_real // config.block, []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, images, rotation)
            if index in config.deepstack_layers:
                features.append(self.deepstack[config.deepstack_layers.index(index)](x, num_rows))
        with jax.named_scope("connector"):
            x = x if self.post_layernorm is None else self.post_layernorm(x)
            return jnp.concatenate([self.connector(x, num_rows), *features], axis=1)


def _rotation(config: VisionConfig, positions: Int[Array, "P 2"]) -> Rotation | None:
    """Return the rotation by row, in the first half of the frequencies, and by column, in the second."""
    if config.rope_theta is None:
        return None
    half = config.head_dim // 2
    frequencies = (config.rope_theta ** -(np.arange(0, half, 2, dtype=np.float64) / half)).astype(np.float32)
    angles = (positions[:, :, None].astype(jnp.float32) * frequencies).reshape(len(positions), -1)  # (P, H/2)
    return Rotation(jnp.cos(angles), jnp.sin(angles))
