"""The programs that fill rows of embeddings before a step reads them: which there are, their calls, and the traced functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import Tokens
from jaxserve.layers.segment_attention import Texts
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.models.vision import VisionTower
from jaxserve.models.vision_layers import Heads, Tile
from jaxserve.runner.images.encoder import (
    ENCODE_FIELDS,
    PLACE_FIELDS,
    Activations,
    ImageShape,
    dummy_item,
    pack_items,
    unpack_patches,
)
from jaxserve.runner.images.given import EMBEDS_FIELDS, batches, dummy_embeds, pack_embeds
from jaxserve.runner.images.parts import WHOLE_KINDS, EncoderTiles, Unit, units_of, whole_units_of
from jaxserve.runner.inputs import Program, StepTask, packed_size, split
from jaxserve.runner.state import StateArrays
from jaxserve.scheduler.plan import EmbedsItem, EncodeItem
from jaxserve.types import ProgramKind

RowItem = EncodeItem | EmbedsItem
_TILE_FIELDS: Final = PLACE_FIELDS | {"first": ""}  # patch of the tile
_BY_COMPILE_TIME: Final[tuple[ProgramKind, ...]] = (
    "encode_end",
    "encode_deepstack",
    "encode_start",
    "encode_heads",
    "encode_window_tile",
    "encode_tile",
    *sorted(WHOLE_KINDS),
)
_DEEPSTACK_FIELDS: Final = PLACE_FIELDS | {"column": ""}  # of the rows of embeddings, in embeddings


def with_images(programs: tuple[Program, ...], shape: ImageShape) -> tuple[Program, ...]:
    """Return the programs of a model that reads rows of embeddings, and those that fill the rows.

    The encoder's have P patches and as many rows as these become; the one that writes embeddings of prompts has as many tokens as rows.
    """
    own = tuple(replace(program, images=shape) for program in programs)
    ride = own[0]
    fill = [
        replace(ride, kind=kind, num_tokens=size, num_rows=shape.rows_of(size))
        for size in shape.buckets
        for kind in _encoder_kinds(shape, size)
    ]
    if shape.num_given:
        fill.append(replace(ride, kind="prompt_embeds", num_tokens=shape.num_given, num_rows=shape.num_given))
    return (*reversed(fill), *own)


def _encoder_kinds(shape: ImageShape, num_patches: int) -> list[ProgramKind]:
    """Return the kinds of the programs of an encoder call, the slowest to compile last."""
    if shape.tiles is None or not shape.tile_of(num_patches):
        return ["encode"]
    tile = shape.tile_of(num_patches)
    found = {unit.kind for unit in units_of(shape.tiles, tile, num_patches)}
    whole = {unit.kind for unit in whole_units_of(shape.tiles, num_patches)} if tile < num_patches else set()
    return [kind for kind in _BY_COMPILE_TIME if kind in found | whole]


@dataclass(frozen=True, slots=True)
class RowCall:
    """A call of a program that runs before a step."""

    program: Program
    packed: np.ndarray
    index: int = 0
    """Number of the module whose parameters it gets: see `SharedParams`."""


def row_calls(items: Sequence[RowItem], wanted: Sequence[Program]) -> Iterator[RowCall]:
    """Yield the calls that fill the rows of `items`, or do a part of it. wanted: the programs that there are."""
    images = [item for item in items if isinstance(item, EncodeItem)]
    if images:
        yield from _encode_calls(images, wanted)
    writers = [each for each in wanted if each.kind == "prompt_embeds"]
    if not writers:
        return
    program, shape = writers[0], writers[0].images
    assert shape is not None, "a program that writes rows"
    for values, rows in batches([item for item in items if isinstance(item, EmbedsItem)], program.num_tokens):
        packed = np.zeros(packed_size(program, EMBEDS_FIELDS), np.int32)
        pack_embeds(values, rows, shape, split(packed, program, EMBEDS_FIELDS))
        yield RowCall(program, packed)


def _encode_calls(items: Sequence[EncodeItem], wanted: Sequence[Program]) -> Iterator[RowCall]:
    """Yield the calls for one part of `items`, of the smallest programs that hold them."""
    count = sum(len(item.patches) for item in items)
    encoders = [each for each in wanted if each.kind.startswith("encode") and each.num_tokens >= count]
    size = min(each.num_tokens for each in encoders)
    programs = {each.kind: each for each in encoders if each.num_tokens == size}
    if "encode" in programs:
        yield _encode_call(programs["encode"], items)
        return
    shape = programs["encode_start"].images
    assert shape is not None and shape.tiles is not None, "an encoder that runs in parts"
    units = units_of(shape.tiles, shape.tile_of(size), count)
    if items[0].units is None and "encode_layer_heads" in programs:
        units = whole_units_of(shape.tiles, size)
    made: dict[ProgramKind, RowCall] = {}
    for unit in units[slice(*items[0].units or (0, len(units)))]:
        if unit.kind not in made:
            made[unit.kind] = _encode_call(programs[unit.kind], items)
        yield _with_unit(made[unit.kind], unit, shape.tiles)


def _with_unit(call: RowCall, unit: Unit, tiles: EncoderTiles) -> RowCall:
    """Return the call with the module and the tile of a unit."""
    packed = call.packed
    if "first" in _STEPS[unit.kind].fields:
        packed = packed.copy()
        split(packed, call.program, _TILE_FIELDS)["first"][...] = unit.first
    elif unit.kind == "encode_deepstack":
        packed = packed.copy()
        column = 1 + sorted(tiles.deepstack_layers).index(tiles.deepstack_layers[unit.index])
        split(packed, call.program, _DEEPSTACK_FIELDS)["column"][...] = column
    return replace(call, packed=packed, index=unit.index)


def _encode_call(program: Program, items: Sequence[EncodeItem]) -> RowCall:
    """Return the call of one of the encoder's programs for `items`."""
    fields = _STEPS[program.kind].fields
    assert program.images is not None, "an encoder program"
    packed = np.zeros(packed_size(program, fields), np.int32)
    pack_items(items, program.num_tokens, program.images, split(packed, program, fields))
    return RowCall(program, packed)


def dummy_items(program: Program) -> dict[str, tuple[RowItem, ...]]:
    """Return items of no request that fill a program, by the field of their plan: it runs, or a part of a call with it."""
    shape = program.images
    assert shape is not None, "a program that fills rows"
    if program.kind == "prompt_embeds":
        return {"embeds_items": (dummy_embeds(shape),)}
    units = None
    if shape.tiles is not None and program.kind != "encode" and program.kind not in WHOLE_KINDS:
        kinds = [unit.kind for unit in units_of(shape.tiles, shape.tile_of(program.num_tokens), program.num_tokens)]
        start = kinds.index(program.kind)
        units = (start, start + 1)
    return {"encode_items": (dummy_item(program.num_tokens, shape, units),)}


def encode_images(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Write the embeddings of images to their rows. DONATES the state; returns it."""
    field, shape = split(packed, program, ENCODE_FIELDS), program.images
    tower = _tower(skeleton, params)
    assert shape is not None, "a model that reads images"
    patches = unpack_patches(field["patches"], program.num_tokens, shape)
    with jax.named_scope("encode"):
        rows = tower.encode(patches, field["patch_places"], field["image_ids"], field.get("row_sources"))
    return _with_rows(state, field["embedding_rows"], rows), ()


def start_encoder(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Compute the activations of images before the first layer. DONATES the state; returns it."""
    field, shape, tower = split(packed, program, ENCODE_FIELDS), program.images, _tower(skeleton, params)
    assert shape is not None, "a model that reads images"
    patches = unpack_patches(field["patches"], program.num_tokens, shape)
    with jax.named_scope("encode"):
        x = tower.embed(patches, field["patch_places"], tower.images(field["image_ids"]))
    kept = _activations(state)
    return state._replace(activations=kept._replace(inputs=kept.inputs.at[: len(x)].set(x))), ()


def compute_heads(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Compute queries, keys and values of a tile in one layer, whose parameters are in the place of the first one's. DONATES the
    state; returns it."""
    place, tower, kept = _TilePlace(program, packed), _tower(skeleton, params), _activations(state)
    with jax.named_scope("encode"):
        tile = place.tile(tower.images(place.image_ids))
        made = tower.heads(0, place.cut(kept.inputs), place.cut(place.positions), tile)
    arrays = (
        jax.lax.dynamic_update_slice_in_dim(array, new.astype(array.dtype), place.first, 0)
        for array, new in zip(kept.heads, made, strict=True)
    )
    return state._replace(activations=kept._replace(heads=Heads(*arrays))), ()


def run_tile(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Compute the output of one layer for a tile, in place of its input. DONATES the state; returns it."""
    place, tower, kept = _TilePlace(program, packed), _tower(skeleton, params), _activations(state)
    count = len(place.image_ids)
    heads = Heads(place.cut(kept.heads.query), kept.heads.key[:count], kept.heads.value[:count])
    with jax.named_scope("encode"):
        images = tower.images(place.image_ids)
        tile, is_windowed = place.tile(images), program.kind in ("encode_window_tile", "encode_window_layer")
        segments = tower.windows(images, place.positions) if is_windowed else images
        x = tower.run_tile(0, place.cut(kept.inputs), heads, segments, tile)
    inputs = jax.lax.dynamic_update_slice_in_dim(kept.inputs, x, place.first, 0)
    return state._replace(activations=kept._replace(inputs=inputs)), ()


class _TilePlace:
    """The tile of a call, and the patches around it: padding fills the last tile."""

    def __init__(self, program: Program, packed: Int[Array, "I"]) -> None:
        field, shape = split(packed, program, _TILE_FIELDS), program.images
        assert shape is not None, "a model that reads images"
        padding = shape.padded(program.num_tokens) - program.num_tokens
        self.image_ids = jnp.pad(field["image_ids"], (0, padding), constant_values=-1)
        self.positions = jnp.pad(field["patch_places"], ((0, padding), (0, 0)))
        is_whole = program.kind in WHOLE_KINDS
        self.first, self.size = field["first"], len(self.image_ids) if is_whole else shape.tile_of(program.num_tokens)

    def cut(self, array: Array) -> Array:
        """Return the tile of an array of patches."""
        return jax.lax.dynamic_slice_in_dim(array, self.first, self.size)

    def tile(self, images: Texts) -> Tile:
        return Tile(self.first, Tokens(jnp.clip(images.num_tokens - self.first, 0, self.size)))


def write_deepstack_features(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Write features of a layer's output to their column of the rows. DONATES the state; returns it."""
    field, tower = split(packed, program, _DEEPSTACK_FIELDS), _tower(skeleton, params)
    with jax.named_scope("encode"):
        num_rows = tower.config.num_rows(tower.images(field["image_ids"]).num_tokens)
        made = tower.deepstack[0](_activations(state).inputs[: program.num_tokens], num_rows)
    return _with_columns(state, field["embedding_rows"], field["column"], made), ()


def end_encoder(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Write the embeddings of images to their rows. DONATES the state; returns it."""
    field, tower = split(packed, program, PLACE_FIELDS), _tower(skeleton, params)
    with jax.named_scope("encode"):
        num_rows = tower.config.num_rows(tower.images(field["image_ids"]).num_tokens)
        x = _activations(state).inputs[: program.num_tokens]
        made = tower.connect(x, num_rows, field.get("row_sources"))
    return _with_columns(state, field["embedding_rows"], jnp.int32(0), made), ()


def _tower(skeleton: ModelSkeleton, params: tuple[Array, ...]) -> VisionTower:
    tower = skeleton.build(params[: len(skeleton.arrays)]).vision  # a drafter's parameters follow
    assert tower is not None, "a model that reads images"
    return tower


def _activations(state: StateArrays) -> Activations:
    assert state.activations is not None, "an encoder that runs in parts"
    return state.activations


def _with_columns(
    state: StateArrays, places: Int[Array, "N"], column: Int[Array, ""], made: Float[Array, "N O"]
) -> StateArrays:
    """Write one embedding of each row, which has others for deepstack features."""
    assert state.images is not None, "a model with rows of embeddings"
    columns = state.images.reshape(len(state.images), -1, made.shape[1])
    columns = columns.at[places, column].set(made.astype(columns.dtype))
    return state._replace(images=columns.reshape(state.images.shape))


def write_embeds(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Write embeddings of prompts to their rows, without deepstack features. DONATES the state; returns it."""
    field, shape = split(packed, program, EMBEDS_FIELDS), program.images
    assert shape is not None, "a program that writes rows"
    values = jax.lax.bitcast_convert_type(field["values"], jnp.float32)
    rows = jnp.pad(values, ((0, 0), (0, shape.width - shape.given_width)))
    return _with_rows(state, field["embedding_rows"], rows), ()


def _with_rows(state: StateArrays, places: Int[Array, "N"], rows: Float[Array, "N W"]) -> StateArrays:
    assert state.images is not None, "a model with rows of embeddings"
    return state._replace(images=state.images.at[places].set(rows.astype(state.images.dtype)))


@dataclass(frozen=True, slots=True)
class _Step:
    """The traced function of the programs of one kind, and the layout of its input."""

    name: str
    function: Callable[..., Any]
    fields: Mapping[str, str]


_STEPS: Final[Mapping[ProgramKind, _Step]] = {
    "encode": _Step("encode images", encode_images, ENCODE_FIELDS),
    "encode_start": _Step("start the encoder", start_encoder, ENCODE_FIELDS),
    "encode_heads": _Step("compute heads of the encoder", compute_heads, _TILE_FIELDS),
    "encode_tile": _Step("run a tile of the encoder", run_tile, _TILE_FIELDS),
    "encode_window_tile": _Step("run a tile of the encoder with windows", run_tile, _TILE_FIELDS),
    "encode_layer_heads": _Step("compute heads of a layer of the encoder", compute_heads, _TILE_FIELDS),
    "encode_layer": _Step("run a layer of the encoder", run_tile, _TILE_FIELDS),
    "encode_window_layer": _Step("run a layer of the encoder with windows", run_tile, _TILE_FIELDS),
    "encode_deepstack": _Step("write deepstack features", write_deepstack_features, _DEEPSTACK_FIELDS),
    "encode_end": _Step("end the encoder", end_encoder, PLACE_FIELDS),
    "prompt_embeds": _Step("write embeddings of prompts", write_embeds, EMBEDS_FIELDS),
}
ROW_KINDS: Final = frozenset(_STEPS)
"""Kinds of the programs that run before a step and have no outputs."""


def row_task(task: StepTask[Any, Any], kind: ProgramKind) -> StepTask[Any, Any]:
    """Return the task of programs of this kind, which is one of ROW_KINDS, beside the steps of `task`."""
    step = _STEPS[kind]
    return replace(task, name=step.name, step=step.function, fields=step.fields)
