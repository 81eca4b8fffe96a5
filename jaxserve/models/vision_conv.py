"""Gated convolutions of vision towers: over the grid of each image, in place of attention (LFM3-VL)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.linear import Linear, Tokens
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.vision import VisionConfig


class Neighbours(NamedTuple):
    """Places on the axis of patches of the K patches around each one, row by row, and whether its image has them."""

    places: Int[Array, "P K"]
    is_patch: Bool[Array, "P K"]


def neighbours_of(config: VisionConfig, positions: Int[Array, "P 2"], sizes: Int[Array, "P 2"]) -> Neighbours:
    """Return the neighbours that a convolution reads. positions, sizes: row and column of each patch, and of its grid rows and columns."""
    assert config.conv_size is not None, "a tower with convolutions"
    steps = jnp.arange(config.conv_size) - config.conv_size // 2
    offsets = jnp.stack(jnp.meshgrid(steps, steps, indexing="ij"), axis=-1).reshape(-1, 2)  # (K, 2)
    around = positions[:, None] + offsets  # (P, K, 2)
    width = sizes[:, 1]
    first = jnp.arange(len(positions)) - _place(positions, width, config.merge)
    is_patch = ((around >= 0) & (around < sizes[:, None])).all(-1)
    places = first[:, None] + _place(around, width[:, None], config.merge)
    return Neighbours(jnp.where(is_patch, places, 0), is_patch)


def _place(positions: Int[Array, "*rows 2"], width: Int[Array, "*sizes"], merge: int) -> Int[Array, "*rows"]:
    """Return places in an image whose patches come block by block. width: patches of a row."""
    row, column = positions[..., 0], positions[..., 1]
    block = (row // merge) * (width // merge) + column // merge
    return block * merge**2 + (row % merge) * merge + column % merge


class Kernel(nnx.Module):
    """The weights of a depthwise convolution, as checkpoints have them: channels, one, rows, columns."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        assert config.conv_size is not None, "a tower with convolutions"
        self.weight = parameter(
            (config.hidden_size, 1, config.conv_size, config.conv_size), (None,) * 4, policy.weights
        )

    def __call__(self, x: Float[Array, "P D"], neighbours: Neighbours) -> Float[Array, "P D"]:
        kernel = self.weight[...].astype(jnp.float32).reshape(len(self.weight), -1).T  # (K, D)
        found = jnp.zeros(x.shape, jnp.float32)
        for number, weights in enumerate(kernel):
            is_patch = neighbours.is_patch[:, number, None]
            found += jnp.where(is_patch, x[neighbours.places[:, number]], 0).astype(jnp.float32) * weights
        return found.astype(x.dtype)


class VisionConv(nnx.Module):
    """Compute out_proj(second * conv(first * third)), with the three parts of in_proj(x)."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        d = config.hidden_size
        self.in_proj = Linear(3 * d, d, (None, None), policy)
        self.spatial_conv = Kernel(config, policy)
        self.out_proj = Linear(d, d, (None, None), policy)

    def __call__(self, x: Float[Array, "P D"], neighbours: Neighbours, tokens: Tokens) -> Float[Array, "P D"]:
        with jax.named_scope("conv"):
            first, second, third = jnp.split(self.in_proj(x, tokens), 3, axis=-1)
            return self.out_proj(second * self.spatial_conv(first * third, neighbours), tokens)
