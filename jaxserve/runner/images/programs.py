"""The programs that fill rows of embeddings before a step reads them: which there are, their calls, and the traced functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.images.encoder import ENCODE_FIELDS, dummy_item, pack_items, unpack_patches
from jaxserve.runner.images.given import EMBEDS_FIELDS, batches, dummy_embeds, pack_embeds
from jaxserve.runner.inputs import Program, StepTask, packed_size, split
from jaxserve.runner.state import StateArrays
from jaxserve.scheduler.plan import EmbedsItem, EncodeItem
from jaxserve.types import ProgramKind

RowItem = EncodeItem | EmbedsItem


def row_calls(items: Sequence[RowItem], wanted: Sequence[Program]) -> Iterator[tuple[Program, np.ndarray]]:
    """Yield the programs that fill the rows of `items`, and their packed inputs. wanted: the programs that there are."""
    images = [item for item in items if isinstance(item, EncodeItem)]
    if images:
        yield _encode_call(images, [each for each in wanted if each.kind == "encode"])
    writers = [each for each in wanted if each.kind == "prompt_embeds"]
    if not writers:
        return
    program, shape = writers[0], writers[0].images
    assert shape is not None, "a program that writes rows"
    for values, rows in batches([item for item in items if isinstance(item, EmbedsItem)], program.num_tokens):
        packed = np.zeros(packed_size(program, EMBEDS_FIELDS), np.int32)
        pack_embeds(values, rows, shape, split(packed, program, EMBEDS_FIELDS))
        yield program, packed


def _encode_call(items: Sequence[EncodeItem], wanted: Sequence[Program]) -> tuple[Program, np.ndarray]:
    """Return the smallest encoder program that holds `items`, and its packed input."""
    count = sum(len(item.patches) for item in items)
    program = min((each for each in wanted if each.num_tokens >= count), key=lambda each: each.num_tokens)
    assert program.images is not None, "an encoder program"
    packed = np.zeros(packed_size(program, ENCODE_FIELDS), np.int32)
    pack_items(items, program.num_tokens, program.images, split(packed, program, ENCODE_FIELDS))
    return program, packed


def dummy_items(program: Program) -> dict[str, tuple[RowItem, ...]]:
    """Return items of no request that fill a program, by the field of their plan."""
    assert program.images is not None, "a program that fills rows"
    if program.kind == "prompt_embeds":
        return {"embeds_items": (dummy_embeds(program.images),)}
    return {"encode_items": (dummy_item(program.num_tokens, program.images),)}


def encode_images(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[()]]:
    """Write the embeddings of images to their rows. DONATES the state; returns it."""
    field, shape = split(packed, program, ENCODE_FIELDS), program.images
    tower = skeleton.build(params).vision
    assert tower is not None and shape is not None, "a model that reads images"
    patches = unpack_patches(field["patches"], program.num_tokens, shape)
    with jax.named_scope("encode"):
        rows = tower.encode(patches, field["patch_places"], field["image_ids"])
    return _with_rows(state, field["embedding_rows"], rows), ()


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


_STEPS: Final[dict[ProgramKind, tuple[str, Callable[..., Any], dict[str, str]]]] = {
    "encode": ("encode images", encode_images, ENCODE_FIELDS),
    "prompt_embeds": ("write embeddings of prompts", write_embeds, EMBEDS_FIELDS),
}
ROW_KINDS: Final = frozenset(_STEPS)
"""Kinds of the programs that run before a step and have no outputs."""


def row_task(task: StepTask[Any, Any], kind: ProgramKind) -> StepTask[Any, Any]:
    """Return the task of programs of this kind, which is one of ROW_KINDS, beside the steps of `task`."""
    name, step, fields = _STEPS[kind]
    return replace(task, name=name, step=step, fields=fields)
