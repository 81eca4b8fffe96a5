"""The vision tower: patches of images to embeddings for the decoder, one encoder driven by a `VisionConfig`.

Several images lie side by side on one flat axis of patches, as texts do in a step: attention stays within an image, and
padding follows the last one. Attribute names are the names that `checkpoint/vision_names` gives a checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.rope import Rotation, rotate
from jaxserve_kernels.segment_attention import has_kernel
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm, RMSNorm, normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.segment_attention import Texts, attend, attend_alike
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.vision_connectors import TableConnector, make_connector, make_deepstack_connector
from jaxserve.models.vision_conv import Neighbours, VisionConv, neighbours_of
from jaxserve.models.vision_embeddings import PatchEmbedding, PositionTable
from jaxserve.sharding.rules import Axes

Rotations = tuple[Rotation, ...]
"""The rotation of a whole head, or of each half of one; empty: queries and keys do not rotate."""


class Heads(NamedTuple):
    """Queries, and keys and values, of patches: perhaps fewer queries than keys."""

    query: Float[Array, "R N H"]
    key: Float[Array, "P N H"]
    value: Float[Array, "P N H"]


class Tile(NamedTuple):
    """Neighbouring patches that a layer computes together, perhaps all: R of P."""

    first: Int[Array, ""]
    tokens: Tokens
    """Number of them without padding."""


class ClippedLinear(Linear):
    """A matmul with inputs and outputs clipped to four stored bounds: those of inputs, then those of outputs."""

    def __init__(self, out_dim: int, in_dim: int, axes: Axes, policy: DtypePolicy, *, bias: bool = False) -> None:
        super().__init__(out_dim, in_dim, axes, policy, bias=bias)
        self.bounds = parameter((4,), (None,), policy.vectors)

    def __call__(self, x: Float[Array, "T I"], tokens: Tokens) -> Float[Array, "T O"]:
        low, high, out_low, out_high = self.bounds[...].astype(x.dtype)
        return jnp.clip(super().__call__(jnp.clip(x, low, high), tokens), out_low, out_high)


def _linear(
    config: VisionConfig, out_dim: int, in_dim: int, policy: DtypePolicy, *, bias: bool | None = None
) -> Linear:
    """bias: None: as most matmuls of layers."""
    make = ClippedLinear if config.has_clipped_matmuls else Linear
    return make(out_dim, in_dim, (None, None), policy, bias=config.has_biases if bias is None else bias)


def _fused(
    config: VisionConfig, counts: Mapping[str, int], policy: DtypePolicy, num_units: int, *, bias: bool | None = None
) -> FusedLinear:
    """Return matmuls of one input of D numbers; those that clip it each have bounds of their own, and are never fused."""
    if config.has_clipped_matmuls:
        policy = replace(policy, fused_for=0)
    make = partial(_linear, config, in_dim=config.hidden_size, policy=policy, bias=bias)
    return FusedLinear(counts, make, policy, num_units=num_units)


def _norm(config: VisionConfig, policy: DtypePolicy) -> LayerNorm | RMSNorm:
    if config.layers == "pre" and not config.has_rms_norms:
        return LayerNorm(config.hidden_size, config.norm_eps, policy)
    return RMSNorm(config.hidden_size, config.norm_eps, policy, "wide" if config.layers == "sandwich" else "plain")


def _head_norm(config: VisionConfig, policy: DtypePolicy) -> RMSNorm | None:
    """Return the norm of queries or keys: of all heads together, or of each head; None: there is none."""
    if config.joint_norm_eps is not None:
        return RMSNorm(config.num_heads * config.head_dim, config.joint_norm_eps, policy)
    if config.has_head_norms:
        return RMSNorm(config.head_dim, config.norm_eps, policy)
    return RMSNorm(config.head_dim, config.norm_eps, policy, "wide") if config.layers == "sandwich" else None


class VisionAttention(nnx.Module):
    """Attention within each image, or within its windows."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        heads, self.head_dim = config.num_heads, config.head_dim
        width = heads * self.head_dim
        kv_heads = config.num_kv_heads or heads
        parts = {"q_proj": width, "k_proj": kv_heads * self.head_dim, "v_proj": kv_heads * self.head_dim}
        self.qkv_proj = _fused(config, parts, policy, kv_heads, bias=config.has_qkv_biases)
        self.group = heads // kv_heads
        self.out_proj = _linear(config, config.hidden_size, width, policy)
        is_plain, eps = config.layers != "sandwich", config.norm_eps
        self.q_norm, self.k_norm = _head_norm(config, policy), _head_norm(config, policy)
        self.is_joint, self.value_eps = config.joint_norm_eps is not None, None if is_plain else eps
        self.scale = None if is_plain else 1.0
        self.length = config.image_patches
        self.has_adjacent_pairs = config.rotary_layout in ("adjacent", "adjacent_halves")
        self.backend = policy.backend

    def heads(self, x: Float[Array, "R D"], tokens: Tokens, rotations: Rotations) -> Heads:
        """Return queries, keys and values of some patches."""
        query, key, value = self.qkv_proj(x, tokens)
        if self.q_norm is not None and self.k_norm is not None and self.is_joint:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.reshape(len(x), -1, self.head_dim) for part in (query, key, value))  # (R, N, H)
        if self.q_norm is not None and self.k_norm is not None and not self.is_joint:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.value_eps is not None:
            value = normalized(value, self.value_eps, is_alike=self.backend in NATIVE).astype(value.dtype)
        if self.has_adjacent_pairs:  # scores do not change if dimensions of queries and keys are reordered alike
            query, key = (jnp.concatenate([each[..., 0::2], each[..., 1::2]], -1) for each in (query, key))
        query, key = _rotated(query, rotations), _rotated(key, rotations)
        if self.group > 1:
            key, value = jnp.repeat(key, self.group, axis=1), jnp.repeat(value, self.group, axis=1)
        return Heads(query, key, value)

    def attend(self, heads: Heads, images: Texts, tile: Tile) -> Float[Array, "R D"]:
        """Return the outputs of a tile. heads: its queries, and the keys and values of all patches."""
        query, key, value = heads
        if self.length is None or len(key) % self.length or has_kernel(self.backend):
            found = attend(query, key, value, images, self.scale, first=tile.first, backend=self.backend)
        elif self.length % len(query) and len(query) % self.length:  # a tile ends in the middle of an image
            found = attend(query, key, value, images, self.scale, first=tile.first)
        else:
            own = max(len(query), self.length)
            start = tile.first // self.length * self.length
            key, value = (jax.lax.dynamic_slice_in_dim(each, start, own) for each in (key, value))
            found = attend_alike(query, key, value, self.length, self.scale)
        return self.out_proj(found.reshape(len(query), -1), tile.tokens)


def _rotated(x: Float[Array, "P N H"], rotations: Rotations) -> Float[Array, "P N H"]:
    """Return heads whose equal parts are rotated, each by one of `rotations`."""
    if not rotations:
        return x
    parts = jnp.split(x, len(rotations), -1)
    return jnp.concatenate([rotate(part, each) for part, each in zip(parts, rotations, strict=True)], -1)


class VisionMLP(nnx.Module):
    """Compute fc2(activation(fc1(x)))."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, f = config.hidden_size, config.intermediate_size
        self.fc1 = _linear(config, f, d, policy)
        self.fc2 = _linear(config, d, f, policy)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "P D"], tokens: Tokens) -> Float[Array, "P D"]:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x, tokens)), tokens)


class GatedVisionMLP(nnx.Module):
    """Compute down(activation(gate(x)) * up(x))."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, f = config.hidden_size, config.intermediate_size
        self.gate_up_proj = _fused(config, {"gate_proj": f, "up_proj": f}, policy, f)
        self.down_proj = _linear(config, d, f, policy)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "P D"], tokens: Tokens) -> Float[Array, "P D"]:
        gate, up = self.gate_up_proj(x, tokens)
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up, tokens)


class VisionLayer(nnx.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x)); what is added may be normalised (sandwich layers) or scaled as well."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy, index: int) -> None:
        is_plain = config.layers != "sandwich"
        self.layer_norm1 = _norm(config, policy)
        self.conv = VisionConv(config, policy) if index in config.conv_layers else None
        self.self_attn = None if index in config.conv_layers else VisionAttention(config, policy)
        self.post_attention_layernorm = None if is_plain else _norm(config, policy)
        self.layer_norm2 = _norm(config, policy)
        self.mlp = (VisionMLP if config.layers == "pre" else GatedVisionMLP)(config, policy)
        self.post_feedforward_layernorm = None if is_plain else _norm(config, policy)
        width = (config.hidden_size,)
        self.layer_scale1 = parameter(width, (None,), policy.vectors) if config.has_layer_scales else None
        self.layer_scale2 = parameter(width, (None,), policy.vectors) if config.has_layer_scales else None

    def __call__(
        self, x: Float[Array, "P D"], images: Texts, rotations: Rotations, neighbours: Neighbours | None
    ) -> Float[Array, "P D"]:
        tile = Tile(jnp.int32(0), Tokens(images.num_tokens))
        if self.conv is not None and neighbours is not None:
            return self._after(x, self.conv(self.layer_norm1(x), neighbours, tile.tokens), tile)
        return self.run(x, self.heads(x, tile.tokens, rotations), images, tile)

    def heads(self, x: Float[Array, "R D"], tokens: Tokens, rotations: Rotations) -> Heads:
        """Return queries, keys and values of some patches."""
        with jax.named_scope("attention"):
            assert self.self_attn is not None, "a layer with attention"
            return self.self_attn.heads(self.layer_norm1(x), tokens, rotations)

    def run(self, x: Float[Array, "R D"], heads: Heads, images: Texts, tile: Tile) -> Float[Array, "R D"]:
        """Return the output of a tile. heads: its queries, and the keys and values of all patches."""
        with jax.named_scope("attention"):
            assert self.self_attn is not None, "a layer with attention"
            return self._after(x, self.self_attn.attend(heads, images, tile), tile)

    def _after(self, x: Float[Array, "R D"], made: Float[Array, "R D"], tile: Tile) -> Float[Array, "R D"]:
        """Return the output of a tile. made: that of its attention or convolution."""
        with jax.named_scope("attention"):
            made = made if self.layer_scale1 is None else made * self.layer_scale1[...].astype(made.dtype)
            x = x + (made if self.post_attention_layernorm is None else self.post_attention_layernorm(made))
        with jax.named_scope("mlp"):
            made = self.mlp(self.layer_norm2(x), tile.tokens)
            made = made if self.layer_scale2 is None else made * self.layer_scale2[...].astype(made.dtype)
            return x + (made if self.post_feedforward_layernorm is None else self.post_feedforward_layernorm(made))


class VisionTower(nnx.Module):
    """Patches to embeddings of the decoder's width."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        policy = policy.unquantized.for_many_rows
        self.config = config
        self.patch_embedding = PatchEmbedding(config, policy)
        width = (config.hidden_size,)
        self.class_embedding = parameter(width, (None,), policy.vectors) if config.has_class_token else None
        self.position_embedding = None if config.positions == "none" else PositionTable(config, policy)
        self.patch_norm = _norm(config, policy) if config.has_patch_norm else None
        self.pre_layernorm = _norm(config, policy) if config.has_first_norm else None
        self.layers = nnx.List([VisionLayer(config, policy, index) for index in range(config.num_layers)])
        make_norm = RMSNorm if config.layers == "gated" else LayerNorm
        self.post_layernorm = make_norm(config.hidden_size, config.norm_eps, policy) if config.has_final_norm else None
        self.connector = make_connector(config, policy)
        newline = parameter((config.output_size,), (None,), policy.vectors) if config.has_newline else None
        self.image_newline = newline
        self.deepstack = nnx.List([make_deepstack_connector(config, policy) for _ in config.deepstack_layers])

    def encode(
        self,
        patches: UInt8[Array, "P F"],
        positions: Int[Array, "P 2"],
        image_ids: Int[Array, "P"],
        sources: Int[Array, "N S"] | None = None,
    ) -> Float[Array, "N W"]:
        """Return an output row for each block of `merge` ** 2 patches, or for each of `sources`: see `VisionConfig.row_width` and `num_sources`.

        positions: row and column of each patch in its image; -1 is the column of a class token. image_ids: a number from 0 to P - 1 for each
        image's or tile's patches, which lie side by side; -1 for padding, which comes last. Rows of padding have no meaning.
        """
        config, images = self.config, self.images(image_ids)
        windows = self.windows(images, positions) if config.window_layers else images
        sizes, rotations = _grid_sizes(positions, images), _rotations(config, positions)
        neighbours = neighbours_of(config, positions, sizes) if config.conv_layers else None
        x = self._embed(patches, positions, sizes)
        num_rows, features, outputs = config.num_rows(images.num_tokens), [], {}
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, windows if index in config.window_layers else images, rotations, neighbours)
            if index + 1 in config.feature_layers:
                outputs[index + 1] = x
            if index in config.deepstack_layers:
                features.append(self.deepstack[config.deepstack_layers.index(index)](x, num_rows))
        if config.feature_layers:
            x = jnp.concatenate([outputs[number] for number in config.feature_layers], axis=1)
        return jnp.concatenate([self.connect(x, num_rows, sources), *features], axis=1)

    def images(self, image_ids: Int[Array, "P"]) -> Texts:
        """Return the places of images on the axis of patches. image_ids: as in `encode`."""
        count = len(image_ids)
        num_real = (image_ids >= 0).sum(dtype=jnp.int32)
        # Padding is one more image: no number of patches is 0.
        return Texts(
            jnp.where(image_ids < 0, count, image_ids), num_real, min(self.config.most_patches or count, count)
        )

    def windows(self, images: Texts, positions: Int[Array, "P 2"]) -> Texts:
        """Return the places of windows, which divide images. positions: as in `encode`."""
        side = self.config.window
        assert side is not None, "a tower with windows"
        place = jnp.concatenate([images.rows[:, None], positions // side], axis=1)
        starts = jnp.pad((place[1:] != place[:-1]).any(1), (1, 0))
        return Texts(jnp.cumsum(starts, dtype=jnp.int32), images.num_tokens, min(side**2, images.longest))

    def embed(self, patches: UInt8[Array, "P F"], positions: Int[Array, "P 2"], images: Texts) -> Float[Array, "P D"]:
        """Return the input of the first layer."""
        return self._embed(patches, positions, _grid_sizes(positions, images))

    def heads(self, index: int, x: Float[Array, "R D"], positions: Int[Array, "R 2"], tile: Tile) -> Heads:
        """Return queries, keys and values of a tile in one layer."""
        return self.layers[index].heads(x, tile.tokens, _rotations(self.config, positions))

    def run_tile(
        self, index: int, x: Float[Array, "R D"], heads: Heads, images: Texts, tile: Tile
    ) -> Float[Array, "R D"]:
        """Return the output of one layer for a tile. heads: its queries, and the keys and values of all patches. images: those, or the
        windows, within which patches attend."""
        return self.layers[index].run(x, heads, images, tile)

    def connect(
        self, x: Float[Array, "P D"], num_rows: Int[Array, ""], sources: Int[Array, "N S"] | None = None
    ) -> Float[Array, "N O"]:
        """Return the embeddings of the blocks, or of `sources`, from the output of the last layer. num_rows: blocks without padding."""
        with jax.named_scope("connector"):
            x = x if self.post_layernorm is None else self.post_layernorm(x)
            if (length := self.config.class_length) is not None:
                x = x.reshape(-1, length, x.shape[1])[:, 1:].reshape(-1, x.shape[1])
            made = self.connector(x, num_rows)
            return made if sources is None else self._arranged(made, sources)

    def _arranged(self, made: Float[Array, "M O"], sources: Int[Array, "N S"]) -> Float[Array, "N O"]:
        """Return the embeddings that `sources` says: see `VisionConfig.num_sources`."""
        if isinstance(self.connector, TableConnector):
            made = jnp.concatenate([made, self.connector.marks.astype(made.dtype)])
        if self.image_newline is not None:
            made = jnp.concatenate([made, self.image_newline[...].astype(made.dtype)[None]])
        if sources.shape[1] == 1:
            return made[sources[:, 0]]
        places, shares = jnp.split(sources, 2, axis=1)
        shares = jax.lax.bitcast_convert_type(shares, jnp.float32)
        found = jnp.zeros((len(sources), made.shape[1]), jnp.float32)
        for number in range(places.shape[1]):
            found += made[places[:, number]].astype(jnp.float32) * shares[:, number, None]
        return found.astype(made.dtype)

    def _embed(
        self, patches: UInt8[Array, "P F"], positions: Int[Array, "P 2"], sizes: Int[Array, "P 2"]
    ) -> Float[Array, "P D"]:
        with jax.named_scope("embed"):
            x = self.patch_embedding(patches)
            x = x if self.patch_norm is None else self.patch_norm(x)
            if self.class_embedding is not None:
                x = jnp.where(positions[:, 1:] < 0, self.class_embedding[...].astype(x.dtype), x)
            if self.position_embedding is not None:
                x = x + self.position_embedding(positions, sizes, x.dtype)
            return x if self.pre_layernorm is None else self.pre_layernorm(x)


def _grid_sizes(positions: Int[Array, "P 2"], images: Texts) -> Int[Array, "P 2"]:
    """Return rows and columns of the grid of each patch's image."""
    count = len(positions)
    return 1 + jax.ops.segment_max(positions, images.rows, count + 1)[images.rows]


def _rotations(config: VisionConfig, positions: Int[Array, "P 2"]) -> Rotations:
    """Return the rotations by row and column of the patches: see `RotaryLayout`."""
    if config.rope_theta is None:
        return ()
    is_alternating = config.rotary_layout == "alternating"
    count = config.head_dim if is_alternating else config.head_dim // 2
    frequencies = (config.rope_theta ** -(np.arange(0, count, 2, dtype=np.float64) / count)).astype(np.float32)
    if is_alternating:
        frequencies = frequencies.reshape(-1, 2).T
    if config.rotary_layout == "adjacent_halves":
        positions = jnp.where(positions[:, 1:] < 0, 0, positions + 1)[:, ::-1]
    if config.rotary_layout == "columns_first":
        positions = positions[:, ::-1]
    angles = positions[:, :, None].astype(jnp.float32) * frequencies  # (P, 2, H/4)
    if config.rotary_layout == "halves":
        return tuple(Rotation(jnp.cos(angles[:, axis]), jnp.sin(angles[:, axis])) for axis in (1, 0))
    if config.rotary_layout == "adjacent":
        angles = angles[:, ::-1].swapaxes(1, 2)
    angles = angles.reshape(len(positions), -1)
    return (Rotation(jnp.cos(angles), jnp.sin(angles)),)
