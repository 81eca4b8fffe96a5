"""The vision tower: patches of images to embeddings for the decoder, one encoder driven by a `VisionConfig`; and the tokens that stand for them.

Several images lie side by side on one flat axis of patches, as texts do in a step: attention stays within an image, and
padding follows the last one. Attribute names are the names that `checkpoint/vision_names` gives a checkpoint's tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxserve_kernels.rope import Rotation
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.layers.norm import LayerNorm, RMSNorm
from jaxserve.layers.param import parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.layers.segment_attention import Texts
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.vision import VisionConfig
from jaxserve.models.vision_connectors import TableConnector, make_connector, make_deepstack_connector
from jaxserve.models.vision_conv import neighbours_of
from jaxserve.models.vision_embeddings import PatchEmbedding, PositionTable
from jaxserve.models.vision_layers import Heads, Rotations, Tile, VisionLayer, WindowMerger, norm


class ImageTokens(NamedTuple):
    """Embeddings that replace those of image tokens. N rows of W numbers: see `VisionConfig.row_width`."""

    embeddings: Float[Array, "N W"]
    """An embedding of D numbers, then the deepstack features of D numbers each. They are not scaled by the decoder."""
    rows: Int[Array, "T"]
    """Row of each token's embedding; negative: the token's own."""

    def at(self, places: Int[Array, "R"]) -> ImageTokens:
        """Return only some of the tokens."""
        return ImageTokens(self.embeddings, self.rows[places])

    def replace(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Return x with the embeddings of images in it."""
        found = self.embeddings[jnp.maximum(self.rows, 0), : x.shape[1]]
        return jnp.where((self.rows >= 0)[:, None], found.astype(x.dtype), x)

    def per_layer_ids(self, token_ids: Int[Array, "T"], config: DecoderConfig) -> Int[Array, "T"]:
        """Return the tokens whose embeddings of each layer the tokens have: see `VisionConfig.per_layer_token_id`."""
        if config.vision is None or config.vision.per_layer_token_id is None:
            return token_ids
        return jnp.where(self.rows < 0, token_ids, config.vision.per_layer_token_id)

    def add_deepstack(self, x: Float[Array, "T D"], layer: int) -> Float[Array, "T D"]:
        """Return the output of decoder layer number `layer`, with the features that belong to it added."""
        start = (1 + layer) * x.shape[1]
        if start >= self.embeddings.shape[1]:
            return x
        found = self.embeddings[jnp.maximum(self.rows, 0), start : start + x.shape[1]]
        return x + jnp.where((self.rows >= 0)[:, None], found.astype(x.dtype), 0)


class VisionTower(nnx.Module):
    """Patches to embeddings of the decoder's width."""

    def __init__(self, config: VisionConfig, policy: DtypePolicy) -> None:
        policy = policy.unquantized
        self.config = config
        self.patch_embedding = PatchEmbedding(config, policy)
        width = (config.hidden_size,)
        self.class_embedding = parameter(width, (None,), policy.vectors) if config.has_class_token else None
        self.position_embedding = None if config.positions == "none" else PositionTable(config, policy)
        self.patch_norm = norm(config, policy) if config.has_patch_norm else None
        self.pre_layernorm = norm(config, policy) if config.has_first_norm else None
        self.layers = nnx.List([VisionLayer(config, policy, index) for index in range(config.num_layers)])
        make_norm = RMSNorm if config.layers == "gated" else LayerNorm
        self.post_layernorm = make_norm(config.hidden_size, config.norm_eps, policy) if config.has_final_norm else None
        self.vit_merger = WindowMerger(config, policy) if config.merger_layer is not None else None
        self.connector = make_connector(config.after_merger, policy)
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
            if index == config.merger_layer and self.vit_merger is not None:
                x, images = self.vit_merger(x, images), self.vit_merger.merged(images)
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
