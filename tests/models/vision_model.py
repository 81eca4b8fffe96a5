"""A checkpoint that reads images, without an engine: processed images, the tower's rows, and a decoder with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels.backend import Backend
from jaxtyping import Array
from PIL import Image

from jaxserve.checkpoint.image_processor import read_image_processor
from jaxserve.checkpoint.preprocessing.videos import read_video_processor
from jaxserve.config import ImagesConfig
from jaxserve.frontend.images.positions import image_spans, mrope_positions
from jaxserve.frontend.images.processor import EncoderItem, ProcessedImage, process_image
from jaxserve.layers.attention import StepContext
from jaxserve.layers.cache import Cache, pages_shape
from jaxserve.layers.linear import Tokens
from jaxserve.layers.policy import plain
from jaxserve.layers.rope import rotation
from jaxserve.layers.segment_attention import Texts
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig
from jaxserve.model_config.vision import most_embeddings
from jaxserve.models.registry import decoder_of, open_model
from jaxserve.models.skeleton import make_skeleton
from jaxserve.models.vision import ImageTokens, VisionTower
from jaxserve.models.vision_layers import Heads, Tile
from jaxserve.runner.images.encoder import block_tokens, placed_sources
from jaxserve.runner.images.parts import SharedParams
from jaxserve.runner.images.served import with_served_images
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from jaxserve.tokenizer.tokenizer import load_tokenizer
from jaxserve.weights.loader import load_params
from tests.models.goldens import DATA
from tests.models.one_row import PAGE_SIZE, new_cache, step_context
from tests.models.pictures import picture

SIZES = ((80, 50), (30, 45), (20, 22))
"""Widths and heights of the goldens' pictures."""
PROMPTS = {1: ("Look: {}\nhello", (0,)), 3: ("{} and {}, then{}?\n\nHow are you", (2, 0, 1))}
"""Number of pictures: the text with a place for each, and the pictures."""
NUM_LOGITS = 8
NUM_PAGES = 16
"""A prompt and its outputs fit, so that one program computes all tokens after prompts."""


@dataclass(frozen=True)
class VisionGolden:
    """A tiny checkpoint of tests/models/data/vision, and transformers' arrays: see tests/tools/make_vision_goldens.py."""

    name: str

    @property
    def path(self) -> Path:
        return DATA / "vision" / self.name

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.path / "golden.npz", allow_pickle=False) as arrays:
            return dict(arrays)


def process(path: Path, index: int, *, is_alone: bool = True) -> ProcessedImage:
    """Process a golden's picture."""
    config = read_image_processor(path)
    assert config is not None, "a checkpoint that reads images"
    return process_image(picture(*SIZES[index], index), config, is_alone=is_alone)


def count_tokens(width: int, height: int, config: ImageProcessorConfig) -> list[int]:
    """Return the number of tokens of each item of a picture of this size."""
    return [item.num_tokens for item in process_image(Image.new("RGB", (width, height)), config).items]


class VisionModel:
    """One prompt with images, which grows."""

    def __init__(self, path: Path, backend: Backend = "reference", dtype: str = "float32") -> None:
        """dtype: of weights and activations."""
        checkpoint = open_model(path)
        decoder = with_served_images(ImagesConfig(), decoder_of(checkpoint), path, checkpoint)
        assert decoder.vision is not None, "a checkpoint that reads images"
        self.config, self.vision = decoder, decoder.vision
        policy = replace(plain(jnp.dtype(dtype)), backend=backend)
        skeleton, sharding = make_skeleton(decoder, policy), make_sharding(decoder, MeshShape())
        self._mesh = sharding.mesh.abstract_mesh
        self._params = load_params(checkpoint, skeleton, sharding, lambda *_: None)
        self._tokenizer = load_tokenizer(path)
        processor = read_image_processor(path)
        assert processor is not None, "a checkpoint that reads images"
        videos = read_video_processor(path)
        self._marks = (*processor.mark_token_ids, *([] if videos is None else [videos.token_id]))
        self._new_cache = lambda pages: new_cache(decoder, pages, "float32", policy.activations, sharding)

        def encode(
            params: tuple[Array, ...], patches: Array, positions: Array, image_ids: Array, sources: Array | None
        ) -> Array:
            vision = skeleton.build(params).vision
            assert vision is not None, "a model with a tower"
            return vision.encode(patches, positions, image_ids, sources)

        def compute(
            params: tuple[Array, ...],
            cache: Cache,
            tokens: Array,
            first: Array,
            rope: Array,
            images: ImageTokens,
            key_ends: Array,
        ) -> tuple[Array, Array, Cache]:
            step: StepContext = step_context(decoder, pages_of(cache), first, len(tokens))
            if self.vision.mrope_sections is not None:
                step = step._replace(rotation=rotation(decoder, rope))
            if self.vision.is_bidirectional and len(tokens) > 1:
                groups = tuple(each._replace(key_ends=key_ends) for each in step.groups)
                step = step._replace(groups=groups, causal_ragged=step.rows.ragged)
            model = skeleton.build(params)
            hidden, cache = model.hidden(tokens, cache, step, images)
            last = hidden[-NUM_LOGITS:]
            return model.logits(last, jnp.int32(len(last))), hidden, cache

        self.hidden = np.zeros((0, decoder.hidden_size), np.float32)
        """Hidden states of the tokens of the last step or run."""
        self._encode, self._compute, self._skeleton = jax.jit(encode), jax.jit(compute), skeleton

    def encode(self, items: list[EncoderItem], num_patches: int) -> list[np.ndarray]:
        """Return the rows of each item, all encoded in one call of `num_patches` patches."""
        with jax.sharding.use_abstract_mesh(self._mesh):
            packed = self._packed(items, num_patches)
            rows = np.asarray(self._encode(self._params, *packed, self._sources(items, num_patches)))
        return self._by_item(rows, items)

    def encode_in_tiles(self, items: list[EncoderItem], num_patches: int, size: int) -> list[np.ndarray]:
        """Return what `encode` returns, computed by programs of a tile of `size` patches of a layer, which all layers share."""
        patches, positions, image_ids = map(jnp.asarray, self._packed(items, num_patches))
        padding = -num_patches % size
        all_ids, all_positions = (
            jnp.pad(image_ids, (0, padding), constant_values=-1),
            jnp.pad(positions, [(0, padding), (0, 0)]),
        )
        shared, config, num_real = SharedParams(self._skeleton), self.vision, (image_ids >= 0).sum(dtype=jnp.int32)

        def tower(params: tuple[Array, ...]) -> VisionTower:
            vision = self._skeleton.build(params).vision
            assert vision is not None, "a model with a tower"
            return vision

        def tile(first: Array) -> Tile:
            return Tile(first, Tokens(jnp.clip(num_real - first, 0, size)))

        start = jax.jit(lambda params: tower(params).embed(patches, positions, tower(params).images(image_ids)))
        heads = jax.jit(lambda params, x, own, first: tower(params).heads(0, x, own, tile(first)))

        def segments(vision: VisionTower, is_windowed: bool) -> Texts:
            images = vision.images(all_ids)
            return vision.windows(images, all_positions) if is_windowed else images

        def run_tile(params: tuple[Array, ...], x: Array, heads: Heads, first: Array, is_windowed: bool) -> Array:
            vision = tower(params)
            return vision.run_tile(0, x, heads, segments(vision, is_windowed), tile(first))

        run = jax.jit(run_tile, static_argnames="is_windowed")
        deepstack = jax.jit(lambda params, x: tower(params).deepstack[0](x, config.num_rows(num_real)))
        sources = self._sources(items, num_patches)
        connect = jax.jit(lambda params, x: tower(params).connect(x, config.num_rows(num_real), sources))
        with jax.sharding.use_abstract_mesh(self._mesh):
            x, features = np.pad(start(self._params), [(0, padding), (0, 0)]), []
            for index in range(config.num_layers):
                params = shared.of(self._params, "encode_heads", index)
                tiles = [(first, slice(first, first + size)) for first in range(0, int(num_real), size)]
                made = [heads(params, x[own], all_positions[own], first) for first, own in tiles]
                missing = len(x) - len(tiles) * size  # of tiles without a patch
                query, key, value = (
                    np.pad(np.concatenate(each), [(0, missing), (0, 0), (0, 0)]) for each in zip(*made, strict=True)
                )
                params = shared.of(self._params, "encode_tile", index)
                for first, own in tiles:
                    parts = Heads(query[own], key, value)
                    x[own] = run(params, x[own], parts, first, is_windowed=index in config.window_layers)
                if index in config.deepstack_layers:
                    place = config.deepstack_layers.index(index)
                    features.append(deepstack(shared.of(self._params, "encode_deepstack", place), x[:num_patches]))
            rows = np.concatenate([connect(self._params, x[:num_patches]), *features], axis=1)
        return self._by_item(rows, items)

    def _by_item(self, rows: np.ndarray, items: list[EncoderItem]) -> list[np.ndarray]:
        """Return the rows of each item in the order of its tokens."""
        ends = np.cumsum([item.num_tokens for item in items])
        parts = np.split(rows[: ends[-1]], ends[:-1])
        if self.vision.num_sources:
            return parts
        places = [item.positions[item.positions[:, 1] >= 0] for item in items]  # without a class token
        orders = [np.argsort(block_tokens(each, self.vision.block)) for each in places]
        return [part[order] for part, order in zip(parts, orders, strict=True)]

    def _packed(self, items: list[EncoderItem], num_patches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the patches, positions and numbers of items side by side, and padding."""
        counts = [len(item.patches) for item in items]
        patches = np.full((num_patches, self.vision.patch_values), 7, np.uint8)
        positions, image_ids = np.zeros((num_patches, 2), np.int32), np.full(num_patches, -1, np.int32)
        patches[: sum(counts)] = np.concatenate([self._framed(item.patches) for item in items])
        positions[: sum(counts)] = np.concatenate([item.positions for item in items])
        image_ids[: sum(counts)] = np.repeat(np.arange(len(items)), counts)
        if self.vision.tile_patches:
            image_ids[: sum(counts)] = np.arange(sum(counts)) // self.vision.tile_patches
        return patches, positions, image_ids

    def _framed(self, patches: np.ndarray) -> np.ndarray:
        """Return patches with all frames of a tower that reads videos: those of an image have equal ones."""
        frames = self.vision.patch_values // patches.shape[1]
        return np.repeat(patches.reshape(len(patches), 3, 1, -1), frames, axis=2).reshape(len(patches), -1)

    def _sources(self, items: list[EncoderItem], num_patches: int) -> np.ndarray | None:
        """Return the sources of all embeddings of a call and of padding; None for a tower without them."""
        vision = self.vision
        if not vision.num_sources:
            return None
        num_outputs, ends = vision.num_rows(num_patches), np.cumsum([0, *(len(item.patches) for item in items)])
        found = np.zeros((most_embeddings(num_outputs, num_patches, vision.tile_patches), vision.num_sources), np.int32)
        parts = [
            placed_sources(item.sources, vision.num_rows(first), vision.num_rows(len(item.patches)), num_outputs)
            for item, first in zip(items, ends, strict=False)
            if item.sources is not None
        ]
        found[: sum(map(len, parts))] = np.concatenate(parts)
        return found

    def tokens(self, text: str) -> np.ndarray:
        """Encode a prompt in which images have been replaced by their text."""
        return np.asarray(self._tokenizer.encode(text), np.int32)

    def run(
        self, token_ids: np.ndarray, items: list[EncoderItem], rows: list[np.ndarray], num_outputs: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the logits (8, V) of the prompt's last tokens, and the greedy tokens after it. `hidden` are then the hidden
        states (T, D) of the prompt and all of these tokens but the last."""
        spans = image_spans(
            token_ids,
            self.vision.image_token_id,
            [item.num_tokens for item in items],
            [item.line for item in items],
            self._marks,
        )
        embeddings = np.concatenate(rows) if rows else np.zeros((1, self.vision.row_width), np.float32)
        which = np.full(len(token_ids), -1, np.int32)
        which[np.isin(token_ids, (self.vision.image_token_id, *self._marks))] = np.arange(
            sum(item.num_tokens for item in items)
        )
        rope, delta = np.tile(np.arange(len(token_ids)), (3, 1)), 0
        if self.vision.mrope_sections is not None:
            grids, times = [item.grid for item in items], [item.time for item in items]
            rope, delta = mrope_positions(len(token_ids), spans, grids, self.vision.merge, times)
        length = len(token_ids)
        assert length + num_outputs <= NUM_PAGES * PAGE_SIZE
        cache = self._new_cache(NUM_PAGES)
        ends = np.arange(1, length + 1)
        for span in spans:
            ends[span.start : span.start + span.length] = span.start + span.length
        ends = np.full(length, length) if self.config.has_whole_prompts else ends
        logits, cache = self._step(cache, token_ids, 0, rope, ImageTokens(embeddings, which), ends)
        hidden = [self.hidden]
        outputs = [int(logits[-1].argmax())]
        nothing = ImageTokens(embeddings[:1], np.array([-1], np.int32))
        while len(outputs) < num_outputs:
            position = length + len(outputs) - 1
            more, cache = self._step(
                cache,
                np.array(outputs[-1:]),
                position,
                np.full((3, 1), position + delta),
                nothing,
                np.array([position + 1]),
            )
            outputs.append(int(more[-1].argmax()))
            hidden.append(self.hidden)
        self.hidden = np.concatenate(hidden)
        return logits, np.array(outputs)

    def _step(
        self, cache: Cache, tokens: np.ndarray, first: int, rope: np.ndarray, images: ImageTokens, key_ends: np.ndarray
    ) -> tuple[np.ndarray, Cache]:
        ends = jnp.asarray(key_ends, jnp.int32)
        arguments = jnp.asarray(tokens, jnp.int32), jnp.int32(first), jnp.asarray(rope, jnp.int32), images, ends
        with jax.sharding.use_abstract_mesh(self._mesh):
            logits, hidden, cache = self._compute(self._params, cache, *arguments)
        self.hidden = np.asarray(hidden)
        return np.asarray(logits), cache


def pages_of(cache: Cache) -> int:
    """Return the pages of a cache for one text."""
    return pages_shape(cache)[1] - 1
