"""The step functions of generation, and the only `jax.jit` of the server.

One function serves both program families: forward over the flat token axis, then sampling of each row's last token, in
one program. The cache and the slots are donated and come back in the same buffers.

A decode program can do several steps in one call. A step differs from the one before it only by its positions, since
tokens come from the slots; so a loop around it carries only arrays that are updated in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxserve.layers.cache import ArrayShape, Cache, CacheShapes
from jaxserve.models.decoder import ReadTokens
from jaxserve.models.skeleton import AnySkeleton, ModelSkeleton
from jaxserve.models.vision import ImageTokens
from jaxserve.runner.context import step_context
from jaxserve.runner.images.programs import ROW_KINDS, row_task
from jaxserve.runner.inputs import (
    INPUT_FIELDS,
    OUTPUT_FIELDS,
    RESIDENT_FIELDS,
    SCORE_FIELDS,
    Computed,
    Outcome,
    Program,
    StepTask,
    dummy_plan,
    no_outcome,
    pack,
    pack_arrays,
    packed_size,
    programs,
    split,
    unpack,
)
from jaxserve.runner.outputs.options import PLAIN_RESULTS, ResultOptions
from jaxserve.runner.outputs.prompt_scores import score_prompts
from jaxserve.runner.outputs.reports import reported
from jaxserve.runner.outputs.routed_experts import no_experts, stacked, with_routed_experts
from jaxserve.runner.page_tables import set_entries, write_row
from jaxserve.runner.slots import MASKS_AT_ONCE, SamplerState, init_slot, put_masks, slots_shape, store_tokens, take_up
from jaxserve.runner.state import CopiedContent, DeviceState, StateArrays, StateProgram, new_cache, page_copy
from jaxserve.sampling.bits import num_words
from jaxserve.sampling.sampler import Sampled, sample
from jaxserve.scheduler.plan import UNREAD_TOKEN, StepPlan, StepResult
from jaxserve.sharding.mesh import Sharding
from jaxserve.sharding.shard_map import batch_sharded


def lower(
    skeleton: AnySkeleton,
    sharding: Sharding,
    program: Program,
    cache: CacheShapes | None,
    task: StepTask[Any, Any] | None = None,
) -> jax.stages.Lowered:
    """Trace one program of `task` for abstract arguments; nothing is allocated on a device.

    cache: None for an encoder. task: None for GENERATION.
    """
    task = task or GENERATION
    if program.kind in ROW_KINDS:
        task = row_task(task, program.kind)

    def step(
        params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"]
    ) -> tuple[StateArrays, tuple[Array, ...]]:
        return task.step(skeleton, params, state, packed, program)

    state = _abstract_state(skeleton, sharding, program, cache)
    if task.keeps_tables:
        shape = (program.num_slots + 1, program.num_tables * program.max_pages)
        tables = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.replicated)
        state = state._replace(tables=tables)  # type: ignore[arg-type]
    params = abstract_params(skeleton, sharding)
    if (draft := task.draft_model) is not None:
        params += abstract_params(draft.skeleton, sharding)
        shape = program.num_slots + 1, 1 + draft.num_drafts
        drafts = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.replicated)
        state = state._replace(drafts=drafts)  # type: ignore[arg-type]
    places = jax.tree.map(lambda array: array.sharding, state), sharding.replicated
    inputs = jax.ShapeDtypeStruct((packed_size(program, task.fields),), jnp.int32, sharding=sharding.replicated)
    # Kernels ask the mesh in context which chip they are compiled for, and how many devices share their heads.
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        jitted = jax.jit(step, donate_argnames="state", out_shardings=places)
        return jitted.lower(params, state, inputs)


def _abstract_state(
    skeleton: AnySkeleton, sharding: Sharding, program: Program, cache: CacheShapes | None
) -> StateArrays:
    slots = None
    if program.num_slots:
        shape = slots_shape(program.num_slots, skeleton.config.vocab_size)
        slots = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding.replicated)
    images = activations = None
    if program.images is not None:
        make = partial(jax.ShapeDtypeStruct, dtype=skeleton.policy.activations, sharding=sharding.replicated)
        images = make((program.images.num_rows + 1, program.images.width))
        activations = program.images.new_activations(make)
    return StateArrays(abstract_cache(cache, sharding), slots, images=images, activations=activations)  # type: ignore[arg-type]


def abstract_cache(cache: CacheShapes | None, sharding: Sharding) -> Cache | None:
    """Return the shapes and shardings of the cache's arrays; None for an encoder."""
    if cache is None:
        return None
    return new_cache(cache, [_abstract(array, sharding) for group in cache for array in group.arrays])


def _abstract(array: ArrayShape, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=sharding.place(array.axes))


def lower_state(sharding: Sharding, program: StateProgram) -> jax.stages.Lowered:
    shapes, place = program.shapes, sharding.replicated
    shape = slots_shape(shapes.num_slots, shapes.vocab_size)
    slots, slot, row, which, words = (
        jax.ShapeDtypeStruct(dims, jnp.int32, sharding=place)
        for dims in (shape, (), shape[1:], (MASKS_AT_ONCE,), (MASKS_AT_ONCE, num_words(shapes.vocab_size)))
    )
    match program.kind:
        case "cache":
            arrays = [_abstract(array, sharding) for array in shapes.arrays]
            zeros = native.untouched_zeros if shapes.backend in NATIVE else _zeros
            bare = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
            return jax.jit(lambda: tuple(zeros(*bare)), out_shardings=tuple(each.sharding for each in arrays)).lower()
        case "slots":
            return jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=place).lower()
        case "init_slot":
            return jax.jit(init_slot, donate_argnames="slots", out_shardings=place).lower(slots, slot, row)
        case "masks":
            put = partial(put_masks, vocab_size=shapes.vocab_size)
            return jax.jit(put, donate_argnames="slots", out_shardings=place).lower(slots, which, words)
        case "tables":
            shape = (shapes.num_slots + 1, shapes.num_tables * shapes.max_pages)
            return jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=place).lower()
        case "table_row":
            shape = (shapes.num_slots + 1, shapes.num_tables * shapes.max_pages)
            tables = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
            entries = jax.ShapeDtypeStruct(shape[1:], jnp.int32, sharding=place)
            return jax.jit(write_row, donate_argnames="tables", out_shardings=place).lower(tables, slot, entries)
        case "images":
            assert shapes.images is not None, "a model with rows of embeddings"
            shape = shapes.images.num_rows + 1, shapes.images.width
            return jax.jit(lambda: jnp.zeros(shape, shapes.image_dtype), out_shardings=place).lower()
        case "activations":
            assert shapes.images is not None, "a model that reads images"
            new = partial(shapes.images.new_activations, partial(jnp.zeros, dtype=shapes.image_dtype))
            return jax.jit(new, out_shardings=place).lower()
        case "drafts":
            dims = (shapes.num_slots + 1, 1 + shapes.num_drafts)
            return jax.jit(lambda: jnp.zeros(dims, jnp.int32), out_shardings=place).lower()
        case "read_pages" | "write_pages":
            return _lower_copy(sharding, program, "pages")
        case "read_states" | "write_states":
            return _lower_copy(sharding, program, "states")


def _lower_copy(sharding: Sharding, program: StateProgram, content: CopiedContent) -> jax.stages.Lowered:
    """Trace a program that copies pages, or slots of states."""
    copy = page_copy(sharding, program.shapes.copied(content), program.num_pages)
    pools, batches = (tuple(each.sharding for each in arrays) for arrays in (copy.pools, copy.batches))
    if program.kind.startswith("read"):
        return jax.jit(copy.read, out_shardings=batches).lower(copy.pools, copy.blocks)
    written = jax.jit(copy.write, donate_argnums=0, out_shardings=pools)
    return written.lower(copy.pools, copy.blocks, *copy.batches)


def _zeros(*arrays: jax.ShapeDtypeStruct) -> Sequence[Array]:
    return [jnp.zeros(array.shape, array.dtype) for array in arrays]


def abstract_params(skeleton: AnySkeleton, sharding: Sharding) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the parameters' shapes and shardings."""
    return tuple(
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding.place(array.axes)) for array in skeleton.arrays
    )


def run_step(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    options: ResultOptions = PLAIN_RESULTS,
) -> tuple[StateArrays, tuple[Array, ...]]:
    """Write KV, attend, sample. DONATES the state; returns it and the packed result.

    With `has_experts`, the experts of every token follow, uint `[K, T, L, k]`; in a mixed program then the scores of prompt
    tokens, which are raw in every mode.
    """
    if program.max_steps == 1:
        return run_single_step(skeleton, params, state, packed, program, options)[:2]
    cache, slots, images = state.cache, state.slots, state.images
    assert cache is not None and slots is not None, "a decoder that samples"
    field, tables = read_plan(state, packed, program)

    def is_going_on(carry: _Carry) -> Bool[Array, ""]:
        _, _, outcome, _, has_end = carry
        return (outcome.num_steps < field["num_steps"]) & ~has_end

    def go_on(carry: _Carry) -> _Carry:
        cache, slots, outcome, routed, _ = carry
        step, later = outcome.num_steps, StateArrays(cache, slots, images=images)
        cache, slots, has_end, experts, computed = _one_step(
            skeleton, params, later, _later(field, step), program, options
        )
        sampled = computed.sampled
        is_last = has_end | (step + 1 == field["num_steps"])
        outcome = Outcome(
            step + 1,
            outcome.token_ids.at[step].set(reported(skeleton.policy, sampled.token_ids, step, is_last)),
            outcome.logprobs.at[step].set(sampled.logprobs),
            *sampled[2:],
        )
        if routed is not None:
            routed = routed.at[step].set(experts)
        return cache, slots, outcome, routed, has_end

    routed = no_experts(skeleton.config, program.max_steps, program.num_tokens) if options.has_experts else None
    start = (cache, slots, no_outcome(program), routed, jnp.bool_(False))
    cache, slots, outcome, routed, _ = jax.lax.while_loop(is_going_on, go_on, start)
    outputs = (pack_arrays(outcome, OUTPUT_FIELDS),)
    after = StateArrays(cache, slots, tables, images, activations=state.activations)
    return after, outputs if routed is None else (*outputs, routed)


def run_single_step(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    packed: Int[Array, "I"],
    program: Program,
    options: ResultOptions,
    *,
    reads_all: bool = False,
) -> tuple[StateArrays, tuple[Array, ...], Computed]:
    """Return what `run_step` returns for a program of one step, and what was computed on the way, `all_hidden` with `reads_all`."""
    field, tables = read_plan(state, packed, program)
    cache, slots, _, experts, computed = _one_step(skeleton, params, state, field, program, options, reads_all)
    sampled = computed.sampled
    outcome = Outcome(jnp.int32(1), sampled.token_ids[None], sampled.logprobs[None], *sampled[2:])
    outputs: tuple[Array, ...] = (pack_arrays(outcome, OUTPUT_FIELDS),)
    if experts is not None:
        outputs += (experts[None],)
    if program.kind == "mixed":
        outputs += (pack_arrays(score_prompts(skeleton, params, computed.all_hidden, field, program), SCORE_FIELDS),)
    return StateArrays(cache, slots, tables, state.images, activations=state.activations), outputs, computed


_Carry = tuple[Cache, Array, Outcome, Array | None, Bool[Array, ""]]
"""State of the loop over decode steps: the cache, the slots, the results, the experts, and whether a request has ended."""


def read_plan(
    state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[dict[str, Array], Int[Array, "X1 M"] | None]:
    """Return the fields of the packed plan by name, page tables among them, and the updated tables of the state."""
    tables = state.tables
    field = split(packed, program, INPUT_FIELDS if tables is None else RESIDENT_FIELDS)
    if tables is not None:
        tables = set_entries(tables, field["table_places"], field["table_pages"])
        field["block_tables"] = tables[field["table_rows"]]
    return field, tables


def forward(
    skeleton: ModelSkeleton, params: tuple[Array, ...], state: StateArrays, packed: Int[Array, "I"], program: Program
) -> tuple[StateArrays, tuple[Float[Array, "T D"]]]:
    """Compute a step without sampling: returns the state (DONATED) and the head's input of each token."""
    field, cache = split(packed, program, INPUT_FIELDS), state.cache
    assert cache is not None, "a decoder"
    hidden, cache = skeleton.build(params).hidden(field["tokens"], cache, step_context(skeleton, field, cache, program))
    return StateArrays(cache, state.slots), (hidden,)


def _later(field: dict[str, Any], step: Int[Array, ""]) -> dict[str, Any]:
    """Return the inputs of decode step number `step` of a call."""
    lengths = field["kv_lengths"]
    states = {}
    if "state_reads" in field:  # later steps read what the one before wrote
        states = {"state_reads": jnp.where(step == 0, field["state_reads"], field["state_writes"])}
    return (
        field
        | states
        | {
            "tokens": jnp.where(step == 0, field["tokens"], UNREAD_TOKEN),
            "positions": field["positions"] + step,
            "kv_lengths": jnp.where(lengths > 0, lengths + step, 0),  # padding rows have none
        }
        | ({"rope_positions": field["rope_positions"] + step} if "rope_positions" in field else {})
    )


def _one_step(
    skeleton: ModelSkeleton,
    params: tuple[Array, ...],
    state: StateArrays,
    field: dict[str, Any],
    program: Program,
    options: ResultOptions,
    reads_all: bool = False,
) -> tuple[Cache, Int[Array, "X1 S"], Bool[Array, ""], UInt[Array, "T L k"] | None, Computed]:
    """Forward and sample; returns the cache and the slots, True if any row's request ends with its new token, the experts of
    every token, None unless `has_experts`, and the intermediate results."""
    model, vocab_size = skeleton.build(params), skeleton.config.vocab_size
    cache, slots = state.cache, state.slots
    assert cache is not None and slots is not None, "a decoder that samples"
    tokens, rows = take_up(slots, field, vocab_size)
    field = field | {"is_real": field["is_real"] * ~rows.is_over[field["rows"]], "kv_lengths": rows.kv_lengths}
    if program.num_state_slots:
        writes = jnp.where(rows.is_over, program.num_state_slots, field["state_writes"])
        field |= {"state_writes": writes}
    images = ImageTokens(state.images, field["image_rows"]) if "image_rows" in field else None  # type: ignore[arg-type]
    context = step_context(skeleton, field, cache, program)
    last = jnp.maximum(field["query_starts"][1:] - 1, 0)  # (B,) each row's newest token
    num_rows = (field["query_starts"][1:] > field["query_starts"][:-1]).sum(dtype=jnp.int32)
    read = ReadTokens(last, num_rows) if program.kind == "mixed" else None
    some = None if reads_all or options.has_experts else read
    hidden, cache, chosen, tapped, all_hidden = model.forward(tokens, cache, context, images, some)
    newest = hidden if read is some else hidden[last]
    with jax.named_scope("sample"):

        def choose(logits: Array, columns: Array, which: Array, num_known: Array, *rest: Array) -> Sampled:
            slots, num_top = rest
            return sample(
                logits, columns, SamplerState(slots, which, vocab_size), num_known, num_top, options.logprobs_mode
            )

        logits, by_row = model.logits(newest, num_rows), (field["sampling"], field["slots"], rows.kv_lengths)
        sampled = batch_sharded(choose, logits, by_row, (slots, field["num_top_logprobs"]), skeleton.policy.rules)
    slots, sampled = jax.lax.optimization_barrier((slots, sampled))  # see `take_up`
    slots, has_end = store_tokens(slots, field, rows, sampled.token_ids, vocab_size)
    shown = jnp.where(rows.is_over, UNREAD_TOKEN, sampled.token_ids)
    experts = stacked(skeleton.config, chosen) if options.has_experts else None
    computed = Computed(field, tokens, all_hidden, sampled._replace(token_ids=shown), images, tapped)
    return cache, slots, has_end, experts, computed


GENERATION: Final = StepTask(
    name="generate",
    step=run_step,
    fields=INPUT_FIELDS,
    programs=programs,
    pack=pack,
    unpack=unpack,
    dummy_plan=dummy_plan,
    num_outputs=lambda plan: 1 if plan.targets is None else 2,
    update_state=lambda state, plan, program, packed: state.init_slots(plan.slot_inits, plan.masks),
    row_items=lambda plan: (*plan.encode_items, *plan.embeds_items),
)
"""Decode and mixed steps that sample."""


def _update_resident(state: DeviceState, plan: StepPlan, program: Program, packed: np.ndarray) -> None:
    state.init_slots(plan.slot_inits, plan.masks)
    field = split(packed, program, RESIDENT_FIELDS)
    state.send_tables(plan, field["table_places"], field["table_pages"])


RESIDENT_GENERATION: Final = replace(
    GENERATION,
    name="generate, page tables on the device",
    fields=RESIDENT_FIELDS,
    pack=partial(pack, fields=RESIDENT_FIELDS),
    update_state=_update_resident,
    keeps_tables=True,
)
"""GENERATION with page tables in the state."""


def generation_task(platform: str, options: ResultOptions = PLAIN_RESULTS) -> StepTask[StepPlan, StepResult]:
    """Return the task of an engine that generates on this platform.

    GPUs keep page tables. A CPU shares its memory with the host; a TPU's tables of large pages are an eighth as long.
    """
    task = RESIDENT_GENERATION if platform == "gpu" else GENERATION
    if options == PLAIN_RESULTS:
        return task
    if options.logprobs_mode != PLAIN_RESULTS.logprobs_mode:
        task = replace(task, name=f"{task.name}, {options.logprobs_mode}")
    if options.has_experts:
        task = with_routed_experts(task)
    return replace(task, step=partial(run_step, options=options))
