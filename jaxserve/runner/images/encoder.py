"""The image encoder as a program: sizes, packed inputs and the traced function.

A call encodes images that lie side by side on one axis of patches, and writes their embeddings to rows of an array that stays
on the device; mixed steps gather them from there. The packed input is one int32 vector, like that of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.segment_attention import QUERY_BLOCK
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.config import Config, ImagesConfig
from jaxserve.errors import ConfigError
from jaxserve.layers.segment_attention import alike_block
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.vision import VisionConfig, most_embeddings, num_embeddings
from jaxserve.models.vision_layers import Heads
from jaxserve.runner.buckets import resolve_limits
from jaxserve.runner.images.parts import EncoderTiles, divide
from jaxserve.scheduler.plan import EncodeItem

MAX_PATCHES: Final = {"cpu": 4096}
"""Patches of one image and of one encoder call, by platform, for towers that take images of any size."""
MAX_ACCELERATOR_PATCHES: Final = 16_384
CACHE_BYTES: Final = {"cpu": 64 << 20}
ACCELERATOR_CACHE_BYTES: Final = 256 << 20
STEP_TOKENS: Final = {"cpu": 10}
"""Tokens of a prompt, by platform, that take half to two thirds as long as a decode step of few requests, which reads the weights once."""
ACCELERATOR_STEP_TOKENS: Final = 128
PROMPT_TOKENS: Final = 256
"""Tokens of text beside an image that a step holds by default if prompts are seen whole."""
_LEAST_PROMPT_TOKENS: Final = 8
"""The text beside an image that a step holds with any setting, in tokens."""
GIVEN_ROWS: Final = 256
"""Embeddings of prompts that one call writes."""
_TILES_AT_ONCE: Final = 4
"""Tiles of one encoder call on accelerators. On CPUs, where arithmetic bounds a call, it is one: text waits less."""
_MIN_PATCHES: Final = 256
_GROWTH: Final = 4
"""Ratio of neighbouring buckets of patches."""


class Activations(NamedTuple):
    """Activations of images between two calls of the encoder's programs."""

    inputs: Float[Array, "P D"]
    """Inputs of a layer; the tiles that are done have its outputs."""
    heads: Heads


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Sizes of the embeddings on the device, and of the programs that make them from images or write given ones."""

    buckets: tuple[int, ...]  # P of each program of the encoder; none for a model that reads no images
    block: int  # patches of an embedding
    patch_bytes: int  # F
    num_rows: int  # Z; one more row takes what padding writes
    width: int  # W
    has_rope_positions: bool
    """True if tokens have three rotary positions."""
    num_given: int = 0
    """Embeddings of prompts that one call writes; 0: prompts are tokens."""
    given_width: int = 0  # D
    is_bidirectional: bool = False
    """True if the tokens of an image attend to each other in both directions."""
    tiles: EncoderTiles | None = None
    """None: every encoder call is one program."""
    has_windows: bool = False
    """True if the blocks of an image follow each other window by window, unlike its tokens."""
    class_length: int | None = None
    """See `VisionConfig`."""
    num_sources: int = 0  # S
    """See `VisionConfig`."""
    tile_patches: int = 0
    """Patches of a tile, if an image may have several; 0: images have none."""
    has_videos: bool = False
    num_frames: int = 1
    """Frames of a patch; those of an image are equal, and it comes with one of them."""

    @property
    def max_patches(self) -> int:
        return max(self.buckets, default=0)

    def rows_of(self, num_patches: int) -> int:
        """Return the most embeddings of whole images with this many patches."""
        outputs = int(num_embeddings(num_patches, self.block, self.class_length))
        return most_embeddings(outputs, num_patches, self.tile_patches) if self.num_sources else outputs

    def tile_of(self, num_patches: int) -> int:
        """Return the patches of a tile in calls of one size of `buckets`; 0: a program has the whole call."""
        return 0 if self.tiles is None else self.tiles.sizes[self.buckets.index(num_patches)]

    def padded(self, num_patches: int) -> int:
        """Return the patches of all tiles of a call of one size of `buckets`."""
        tile = self.tile_of(num_patches)
        return -(-num_patches // tile) * tile

    @property
    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what is kept between parts: inputs of a layer `[P, D]`, then queries, keys and values `[P, N, H]`; none without
        parts."""
        if self.tiles is None:
            return ()
        largest = max(self.padded(size) for size in self.buckets if self.tile_of(size))
        return (largest, self.tiles.hidden_size), *3 * ((largest, *self.tiles.heads),)

    def new_activations(self, make: Callable[[tuple[int, ...]], Any]) -> Activations | None:
        """Return what `make` makes of each shape of `activations`; None if there are none."""
        inputs, *heads = [make(shape) for shape in self.activations] or [None]
        return None if inputs is None else Activations(inputs, Heads(*heads))

    def num_bytes(self, itemsize: int) -> int:
        """Return the bytes on each device of the embeddings, and of the activations between parts."""
        return ((self.num_rows + 1) * self.width + sum(map(math.prod, self.activations))) * itemsize


def image_shape(vision: VisionConfig, config: ImagesConfig, platform: str, itemsize: int) -> ImageShape:
    """Return the sizes that settings, or the platform's defaults, give the encoder; itemsize: bytes of an activation.

    Raises ConfigError.
    """
    buckets = _buckets(vision, config.max_image_patches, platform)
    wanted = config.image_cache_memory
    if wanted is None:
        wanted = CACHE_BYTES.get(platform, ACCELERATOR_CACHE_BYTES)
    shape = ImageShape(
        buckets=buckets,
        block=vision.block,
        class_length=vision.class_length,
        patch_bytes=vision.patch_values,
        num_rows=0,
        width=vision.row_width,
        has_rope_positions=vision.mrope_sections is not None,
        is_bidirectional=vision.is_bidirectional,
        has_windows=vision.window is not None,
        num_sources=vision.num_sources,
        tile_patches=vision.tile_patches,
        has_videos=vision.has_videos,
        num_frames=vision.patch_frames,
    )
    smallest, row_bytes = shape.rows_of(buckets[-1]), vision.row_width * itemsize
    if config.image_cache_memory is not None and wanted < smallest * row_bytes:
        raise ConfigError(
            f"--image-cache-memory {wanted}: the embeddings of one encoder call take {smallest * row_bytes} bytes"
        )
    return replace(shape, num_rows=max(smallest, wanted // row_bytes))


def image_step_tokens(platform: str, config: ImagesConfig) -> int:
    """Return the setting, or the platform's default, of `--image-step-tokens`."""
    return config.image_step_tokens or STEP_TOKENS.get(platform, ACCELERATOR_STEP_TOKENS)


def rows_shape(
    decoder: DecoderConfig, config: ImagesConfig, platform: str, itemsize: int, step_work: int | None = None
) -> ImageShape | None:
    """Return the sizes of the embeddings on the device; None if all prompts are tokens.

    itemsize: bytes of an activation. step_work: as in `parts.divide`; None: no encoder call is divided. Raises ConfigError.
    """
    shape = None if decoder.vision is None else image_shape(decoder.vision, config, platform, itemsize)
    if shape is not None and decoder.vision is not None and step_work is not None:
        shape = replace(shape, tiles=divide(decoder.vision, shape.buckets, step_work))
    if not config.enable_prompt_embeds:
        return shape
    if shape is None:
        memory, row_bytes = config.image_cache_memory, decoder.hidden_size * itemsize
        if memory is not None and memory < GIVEN_ROWS * row_bytes:
            raise ConfigError(
                f"--image-cache-memory {memory}: {GIVEN_ROWS} embeddings of a prompt take {GIVEN_ROWS * row_bytes} bytes"
            )
        if memory is None:
            memory = CACHE_BYTES.get(platform, ACCELERATOR_CACHE_BYTES)
        num_rows = max(GIVEN_ROWS, memory // row_bytes)
        shape = ImageShape((), 1, 0, num_rows, decoder.hidden_size, has_rope_positions=False)
    return replace(shape, num_given=GIVEN_ROWS, given_width=decoder.hidden_size)


def encoder_bytes(vision: VisionConfig, num_patches: int, itemsize: int) -> int:
    """Estimate the bytes of activations of one encoder call of `num_patches` patches on one device.

    Counted are the widest point of a layer, pixels in float32, the scores of a block of queries in float32 twice, and the rows.
    """
    feed_forward = (2 if vision.layers == "pre" else 3) * vision.intermediate_size
    width = 2 * vision.hidden_size + max(4 * vision.num_heads * vision.head_dim, feed_forward)
    pixels = 4 * vision.patch_values
    scores = 2 * 4 * vision.num_heads * _scores_per_head(vision, num_patches)
    rows = (
        (1 + bool(vision.num_sources))
        * int(vision.num_rows(num_patches))
        * (vision.row_width + vision.block * vision.hidden_size)
        * itemsize
    )
    return num_patches * (width * itemsize + pixels) + scores + rows


def _scores_per_head(vision: VisionConfig, num_patches: int) -> int:
    """Return the scores that one head has at a time, of a block of queries."""
    if not vision.num_layers:
        return 0
    own, longest = vision.image_patches, vision.most_patches or num_patches
    if own is None:
        return QUERY_BLOCK * min(num_patches, QUERY_BLOCK + 2 * longest)
    block, num_images = alike_block(num_patches, own)
    return block * num_images * own


def _buckets(vision: VisionConfig, most: int | None, platform: str) -> tuple[int, ...]:
    own, default = vision.image_patches, MAX_PATCHES.get(platform, MAX_ACCELERATOR_PATCHES)
    if own is not None and vision.tile_patches:
        return _tile_buckets(own, vision.most_tiles, default if most is None else most)
    if own is not None:
        if most is not None and most < own:
            raise ConfigError(f"--max-image-patches {most}: every image of this model has {own} patches")
        count = _TILES_AT_ONCE if most is None and platform != "cpu" else (most or own) // own
        return (own,) if count == 1 else (own, own * count)
    if most is not None and most < vision.block:
        raise ConfigError(f"--max-image-patches {most}: {vision.block} patches make one token of this model")
    if vision.patch_budget is not None:
        own = _largest(vision, most, platform)
        most = (own if platform == "cpu" else min(_TILES_AT_ONCE * own, default)) if most is None else most
        return (own,) if most < 2 * own else (own, most // own * own)
    most = (most or default) // vision.block * vision.block
    sizes, size = [], _MIN_PATCHES * vision.block
    while size < most:
        sizes.append(size)
        size *= _GROWTH
    return (*sizes, most)


def _tile_buckets(own: int, most_tiles: int, most: int) -> tuple[int, ...]:
    """Return the patches of calls that encode images of up to `most_tiles` tiles of `own` patches."""
    if most < own:
        raise ConfigError(f"--max-image-patches {most}: every image of this model has at least {own} patches")
    sizes, size = [], own
    while size < (largest := min(most_tiles, most // own) * own):
        sizes.append(size)
        size *= _GROWTH
    return (*sizes, largest)


def _largest(vision: VisionConfig, most: int | None, platform: str) -> int:
    """Return the patches of the largest image of a tower whose images are as large as they may be, or alike."""
    if vision.image_patches is not None:
        return vision.image_patches
    assert vision.patch_budget is not None, "a tower with a bound on patches"
    bound = MAX_PATCHES.get(platform, MAX_ACCELERATOR_PATCHES) if most is None else most
    return min(vision.patch_budget, bound) // vision.block * vision.block


def image_settings(config: Config, decoder: DecoderConfig, platform: str) -> Config:
    """Return settings that work with the model's images: a step holds the tokens of an image that attend in both directions.

    It also holds a token of every other request. Raises ConfigError for a setting that does not work with image input.
    """
    check_images(config, decoder)
    vision, scheduler = decoder.vision, config.scheduler
    if vision is None or not vision.is_bidirectional or vision.most_patches is None:
        return config
    limits = resolve_limits(platform, scheduler)
    own = vision.num_rows(_largest(vision, config.images.max_image_patches, platform))
    text = 0
    if decoder.has_whole_prompts:
        _check_windows(decoder, own)
        text = PROMPT_TOKENS if scheduler.max_num_batched_tokens is None else _LEAST_PROMPT_TOKENS
    needed = own + text + limits.max_num_seqs - 1
    if limits.max_num_batched_tokens >= needed:
        return config
    if scheduler.max_num_batched_tokens is not None:
        raise ConfigError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}: an image of this model has up to {own} tokens, which one "
            f"step computes beside a token for each other of --max-num-seqs {limits.max_num_seqs} requests; use {needed}"
            + ("" if decoder.has_whole_prompts else ", or --limit-mm-per-prompt image=0 to serve text only")
        )
    return replace(config, scheduler=replace(scheduler, max_num_batched_tokens=needed))


def _check_windows(decoder: DecoderConfig, image_tokens: int) -> None:
    """Raise ConfigError if an image and a text do not fit the windows of a model whose prompts are seen whole."""
    windows = [layer.sliding_window for layer in decoder.layers if layer.sliding_window is not None]
    if windows and min(windows) < image_tokens + _LEAST_PROMPT_TOKENS:
        raise ConfigError(
            f"an image of this model has {image_tokens} tokens; a prompt is seen whole, and may have no more than the model's window "
            f"of {min(windows)} tokens, which leaves no room for a text"
        )


def check_images(config: Config, decoder: DecoderConfig) -> None:
    """Raise ConfigError for a setting that does not work with image input, or a model without embeddings of prompts."""
    if config.images.enable_prompt_embeds:
        _check_prompt_embeds(decoder)
    if decoder.vision is None:
        return
    hosts, ranks = config.hosts.num_hosts, config.parallel.data_parallel_size
    stores = ", ".join(config.tiers.settings)
    for flag, is_set in (
        (f"--num-hosts {hosts}", hosts > 1),
        (f"--data-parallel-size {ranks}", ranks > 1),
        ("--deterministic", config.compile.deterministic),
        (stores, config.tiers.has_stores),
    ):
        if is_set:
            raise ConfigError(f"{flag}: not with image input; use --limit-mm-per-prompt image=0 to serve text only")


def _check_prompt_embeds(decoder: DecoderConfig) -> None:
    """Raise ConfigError for a model whose embeddings are not all that its first layer reads."""
    reason = None
    if decoder.per_layer_dim is not None:
        reason = "has further embeddings of each token in every layer"
    elif decoder.embedding_scale != 1:
        reason = f"multiplies its embeddings by {decoder.embedding_scale:g}"
    elif any(layer.ngram is not None for layer in decoder.layers):
        reason = "has embeddings of several tokens in a row"
    elif any(layer.experts is not None and layer.experts.is_hashed for layer in decoder.layers):
        reason = "chooses experts by tokens"
    if reason is not None:
        raise ConfigError(f"--enable-prompt-embeds: this model {reason}: its prompts must be tokens")


PLACE_FIELDS: Final = {
    "image_ids": "T",  # of each patch, those of each tile of an image another one; -1: padding, which comes last
    "patch_places": "T 2",
    "embedding_rows": "B",  # of each block of patches, or of each embedding; padding points after the last one
    "row_sources": "B S",  # of each embedding, see `VisionConfig.num_sources`
}
ENCODE_FIELDS: Final = PLACE_FIELDS | {"patches": "TF"}  # uint8, four in a word


def pack_items(items: Sequence[EncodeItem], num_patches: int, shape: ImageShape, field: dict[str, np.ndarray]) -> None:
    """Fill in the fields of a packed encoder call of `num_patches` patches, its pixels if there is a field for them."""
    field["image_ids"][:] = -1
    field["embedding_rows"][:] = shape.num_rows
    patches = None
    if "patches" in field:
        patches = field["patches"].view(np.uint8)[: num_patches * shape.patch_bytes].reshape(num_patches, -1)
    first = first_row = first_tile = 0
    num_outputs = int(num_embeddings(num_patches, shape.block, shape.class_length))
    for item in items:
        end, end_row = first + len(item.patches), first_row + len(item.rows)
        tile = shape.tile_patches or len(item.patches)
        field["image_ids"][first:end] = first_tile + np.arange(len(item.patches)) // tile
        first_tile += len(item.patches) // tile
        if item.sources is not None:
            own, before = (int(num_embeddings(each, shape.block, shape.class_length)) for each in (end - first, first))
            field["row_sources"][first_row:end_row] = placed_sources(item.sources, before, own, num_outputs)
        field["patch_places"][first:end] = item.positions
        rows = item.rows[block_tokens(item.positions, shape.block)] if shape.has_windows else item.rows
        field["embedding_rows"][first_row:end_row] = rows
        if patches is not None:
            patches[first:end] = framed(item.patches, shape)
        first, first_row = end, end_row


def framed(patches: np.ndarray, shape: ImageShape) -> np.ndarray:
    """Return patches with all frames, those of an image again and again. patches: uint8 (P, F), of an image fewer values."""
    if patches.shape[1] == shape.patch_bytes:
        return patches
    return np.tile(patches.reshape(len(patches), 3, 1, -1), (1, 1, shape.num_frames, 1)).reshape(len(patches), -1)


def placed_sources(sources: np.ndarray, first: int, count: int, num_outputs: int) -> np.ndarray:
    """Return the sources of an image whose outputs are number `first` and so on of `num_outputs` of a call.

    sources: those of an image alone with `count` outputs, int32 (N, S), see `VisionConfig.num_sources`.
    """
    found, width = sources.copy(), (sources.shape[1] + 1) // 2
    places = found[:, :width]
    places += np.where(places < count, first, num_outputs - count)
    return found


def block_tokens(positions: np.ndarray, block: int) -> np.ndarray:
    """Return the token of each block of an image, whose tokens are its blocks row by row. positions: row and column of each patch."""
    rows, columns = positions[::block].T // math.isqrt(block)
    tokens: np.ndarray = rows * (1 + columns.max()) + columns
    return tokens


def unpack_patches(words: Int[Array, "M"], num_patches: int, shape: ImageShape) -> UInt8[Array, "P F"]:
    """Return the patches of a packed call. Traced."""
    values = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)
    return values[: num_patches * shape.patch_bytes].reshape(num_patches, shape.patch_bytes)


def dummy_item(num_patches: int, shape: ImageShape, units: tuple[int, int] | None = None) -> EncodeItem:
    """Return an image of no request, for the first run of a program; its embeddings go to the row of padding."""
    rows = np.full(shape.rows_of(num_patches), shape.num_rows, np.int32)
    patches, places = np.zeros((num_patches, shape.patch_bytes), np.uint8), np.zeros((num_patches, 2), np.int32)
    return EncodeItem(patches, places, rows, units=units)
