"""Layers of vision towers: attention within images or windows, feed-forward blocks, and what makes one vector of a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.backend import NATIVE
from jaxserve_kernels.rope import Rotation, rotate
from jaxserve_kernels.segment_attention import has_kernel
from jaxtyping import Array, Float, Int

from jaxserve.layers.fused import FusedLinear
from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.mlp import ACTIVATIONS
from jaxserve.layers.norm import LayerNorm, RMSNorm, normalized
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.segment_attention import Texts, attend, attend_alike
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.vision_conv import Neighbours, VisionConv
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


def norm(config: VisionConfig, policy: DtypePolicy) -> LayerNorm | RMSNorm:
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
        self.layer_norm1 = norm(config, policy)
        self.conv = VisionConv(config, policy) if index in config.conv_layers else None
        self.self_attn = None if index in config.conv_layers else VisionAttention(config, policy)
        self.post_attention_layernorm = None if is_plain else norm(config, policy)
        self.layer_norm2 = norm(config, policy)
        self.mlp = (VisionMLP if config.layers == "pre" else GatedVisionMLP)(config, policy)
        self.post_feedforward_layernorm = None if is_plain else norm(config, policy)
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


class WindowMerger(nnx.Module):
    """Attention within each window of a block, and a feed-forward block that makes one vector of the patches of a window, beside their mean."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d, self.count = config.hidden_size, config.inner_merge**2
        self.layer_norm1 = LayerNorm(d, config.norm_eps, policy)
        self.self_attn = VisionAttention(config, policy)
        self.pre_norm = LayerNorm(self.count * d, config.norm_eps, policy)
        inner = self.count * config.intermediate_size
        self.linear_1 = Linear(inner, self.count * d, (None, None), policy, bias=True)
        self.linear_2 = Linear(d, inner, (None, None), policy, bias=True)

    def __call__(self, x: Float[Array, "P D"], images: Texts) -> Float[Array, "M D"]:
        count = self.count
        windows = Texts(jnp.arange(len(x), dtype=jnp.int32) // count, images.num_tokens, min(count, images.longest))
        tile = Tile(jnp.int32(0), Tokens(images.num_tokens))
        heads = self.self_attn.heads(self.layer_norm1(x), tile.tokens, ())
        x = x + self.self_attn.attend(heads, windows, tile)
        x = x.reshape(len(x) // count, count, -1)
        tokens = Tokens(images.num_tokens // count)
        made = self.linear_1(self.pre_norm(x.reshape(len(x), -1)), tokens)
        return self.linear_2(ACTIVATIONS["gelu_tanh"](made), tokens) + x.mean(1)

    def merged(self, images: Texts) -> Texts:
        """Return the places of images on the axis of the vectors of windows."""
        count = self.count
        return Texts(images.rows[::count], images.num_tokens // count, max(images.longest // count, 1))
