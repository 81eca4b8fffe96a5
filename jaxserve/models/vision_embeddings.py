"""Inputs of a vision tower's layers: patches of pixels times a matrix, and learned positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.norm import LayerNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.model_config.vision import VisionConfig


class PatchEmbedding(nnx.Module):
    """Compute weight @ patch, and perhaps add a bias: a convolution whose stride is its size. See `PatchKind`."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        depth = () if config.num_frames is None else (config.num_frames,)
        kernel: tuple[int, ...] = (config.num_channels, *depth, config.patch_size, config.patch_size)
        self.is_linear = config.patches == "linear"
        self.num_frames = config.num_frames if config.patches in ("flat", "frames") else None
        self.frame_axis = 1 if config.patches == "frames" else 2
        if config.patches != "convolution":
            kernel = (config.patch_values * (self.num_frames or 1),)
        axes = (None,) * (1 + len(kernel))
        self.weight = parameter((config.hidden_size, *kernel), axes, policy.weights)
        self.bias = parameter((config.hidden_size,), (None,), policy.vectors) if config.has_patch_bias else None
        self.num_channels, self.patch_frames = config.num_channels, config.patch_frames
        eps = config.pixel_norm_eps
        self.norm = None if eps is None else LayerNorm(config.patch_values, eps, policy)
        self.normalization = config.normalization
        self.dtype = policy.activations

    def __call__(self, patches: UInt8[Array, "P F"]) -> Float[Array, "P D"]:
        pixels = patches.astype(jnp.float32).reshape(len(patches), len(self.normalization.means), -1)
        means, deviations = (
            self._rounded(jnp.asarray(each, jnp.float32)[:, None])
            for each in (self.normalization.means, self.normalization.deviations)
        )
        scaled = self._rounded(pixels * np.float32(self.normalization.scale))
        values = self._rounded(self._rounded(scaled - means) / deviations)
        kernel = self.weight[...]
        if self.norm is not None:  # channels last, as in the matrix
            values = self.norm(values.swapaxes(1, 2).reshape(patches.shape).astype(self.dtype))
        values = values.reshape(patches.shape).astype(self.dtype)
        if kernel.ndim == 5 and self.patch_frames == 1:  # every frame of an image is the same
            kernel = kernel.astype(jnp.float32).sum(2).astype(kernel.dtype)
        elif self.num_frames is not None:  # the same, stored as a matrix
            axes = [self.num_channels, self.num_channels]
            axes[self.frame_axis - 1] = self.num_frames
            kernel = (
                kernel.astype(jnp.float32).reshape(len(kernel), *axes, -1).sum(self.frame_axis).astype(kernel.dtype)
            )
        elif self.is_linear and self.norm is None:  # channels last
            kernel = kernel.reshape(len(kernel), -1, self.num_channels).swapaxes(1, 2)
        kernel = kernel.reshape(kernel.shape[0], -1).astype(self.dtype)
        made = jnp.einsum("pf,df->pd", values, kernel, preferred_element_type=jnp.float32)
        made = made.astype(self.dtype)
        return made if self.bias is None else made + self.bias[...]

    def _rounded(self, values: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        # A cast to bfloat16 and back is one that XLA may leave out.
        return jax.lax.reduce_precision(values, 8, 7) if self.normalization.is_rounded else values


class PositionTable(nnx.Module):
    """Learned positions, one for each place of a square grid, or for each column and each row."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        self.side = config.positions_per_side
        self.kind = config.positions
        self.first = int(config.has_class_token)
        shape = (2, self.side) if self.kind == "axes" else (self.first + self.side**2,)
        self.weight = parameter((*shape, config.hidden_size), (None,) * (len(shape) + 1), policy.vectors)

    def __call__(self, positions: Int[Array, "P 2"], sizes: Int[Array, "P 2"], dtype: jnp.dtype) -> Float[Array, "P D"]:
        """Return the position of each patch. sizes: rows and columns of the grid of each patch's image."""
        table = self.weight[...]
        if self.kind == "axes":
            return (table[0, positions[:, 1]] + table[1, positions[:, 0]]).astype(dtype)
        if self.kind == "nearest":
            positions = positions * self.side // sizes
        if self.kind in ("table", "nearest"):
            return table[self.first + positions[:, 0] * self.side + positions[:, 1]].astype(dtype)
        if self.kind in ("linear", "padded", "cubic"):
            return self._between_edges(table, positions, sizes).astype(dtype)
        if self.kind == "filtered":
            return self._filtered(table, positions, sizes).astype(dtype)
        # The grid's corners are the table's corners.
        exact = positions * (self.side - 1) / jnp.maximum(sizes - 1, 1)
        low = jnp.floor(exact).astype(jnp.int32)
        high, share = jnp.minimum(low + 1, self.side - 1), exact - low  # (P, 2)
        found = jnp.zeros((len(positions), table.shape[1]), jnp.float32)
        for rows, of_row in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, of_column in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                found += table[rows * self.side + columns] * (of_row * of_column)[:, None]
        return found.astype(dtype)

    def _between_edges(
        self, table: Float[Array, "S D"], positions: Int[Array, "P 2"], sizes: Int[Array, "P 2"]
    ) -> Float[Array, "P D"]:
        """Return the position of each patch from the 4 or 16 places around its middle; those beyond an edge are the edge's, or
        zero."""
        exact = (positions + 0.5) * (self.side / sizes) - 0.5
        low = jnp.floor(exact).astype(jnp.int32)
        past = exact - low  # (P, 2)
        first, shares = 0, [1 - past, past]
        if self.kind == "cubic":
            first = -1
            shares = [_cubic_share(past + 1), _cubic_share(past), _cubic_share(1 - past), _cubic_share(2 - past)]
        reached = [low + step for step in range(first, first + len(shares))]
        places = [jnp.clip(each, 0, self.side - 1) for each in reached]
        if self.kind == "padded":
            shares = [
                jnp.where(each == place, share, 0) for each, place, share in zip(reached, places, shares, strict=True)
            ]
        found = jnp.zeros((len(positions), table.shape[1]), jnp.float32)
        for row, of_row in zip(places, shares, strict=True):
            for column, of_column in zip(places, shares, strict=True):
                found += table[row[:, 0] * self.side + column[:, 1]] * (of_row[:, 0] * of_column[:, 1])[:, None]
        return found

    def _filtered(
        self, table: Float[Array, "S D"], positions: Int[Array, "P 2"], sizes: Int[Array, "P 2"]
    ) -> Float[Array, "P D"]:
        """Return the position of each patch from the places whose middles are nearer to its own than a step of the grid, or of the
        table if that is longer."""
        step = self.side / sizes
        distance = jnp.abs(np.arange(self.side) + 0.5 - ((positions + 0.5) * step)[..., None])  # (P, 2, side)
        shares = jnp.maximum(1 - distance / jnp.maximum(step, 1)[..., None], 0)
        shares /= shares.sum(-1, keepdims=True)
        both = (shares[:, 0, :, None] * shares[:, 1, None, :]).reshape(len(positions), -1)
        return jnp.einsum("ps,sd->pd", both, table.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


def _cubic_share(distance: Float[Array, "P 2"]) -> Float[Array, "P 2"]:
    """Return the share of a place at this distance, 0 to 2, by Keys' convolution with the slope of torch."""
    slope, square = -0.75, distance * distance
    near = (slope + 2) * square * distance - (slope + 3) * square + 1
    far = slope * (square * distance - 5 * square + 8 * distance - 4)
    return jnp.where(distance < 1, near, far)
