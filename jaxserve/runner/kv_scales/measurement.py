"""Measures scales of a KV cache in int8 with a model's own weights, where the checkpoint has none for it.

A program computes a row of fixed random tokens with a cache in the activations' dtype, and takes the largest key and the largest value of each number
of each head. Keys are measured as they are stored, after their rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Int

from jaxserve.layers.cache import CacheShapes, group_shapes
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.inputs import INPUT_FIELDS, Program, packed_size, split
from jaxserve.runner.kv_scales.step import measure, measured_names
from jaxserve.runner.program_cache import ProgramCache
from jaxserve.runner.program_key import host_key_parts, process_key_parts, program_key
from jaxserve.runner.state import StateArrays, new_cache
from jaxserve.runner.steps import GENERATION, abstract_params, lower
from jaxserve.runner.warmup import MadeProgram, compile_all
from jaxserve.sharding.mesh import Sharding

NUM_TOKENS: Final = 512
PAGE_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class KVScaleMeasurement:
    """Replaces the measured scales among the parameters of a model. Its program is compiled once.

    It is one program over the devices of all hosts, and every host gets the whole of its results: all have the same scales.
    """

    places: tuple[int, ...]
    """Places of the scales among the parameters, in the order of the program's results."""
    sharding: Sharding
    shapes: CacheShapes
    packed: Int[np.ndarray, "I"]
    made: MadeProgram

    def __call__(self, params: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Return the parameters with scales that are measured with the others."""
        arrays = [
            _on_all(np.zeros(array.shape, array.dtype), self.sharding.place(array.axes))
            for group in self.shapes
            for array in group.arrays
        ]
        state = StateArrays(new_cache(self.shapes, arrays), None)
        others = tuple(param for index, param in enumerate(params) if index not in self.places)
        _, scales = self.made.compiled(others, state, self.packed)
        changed = list(params)
        for place, scale in zip(self.places, scales, strict=True):
            changed[place] = _on_all(np.asarray(scale), params[place].sharding)
        return tuple(changed)


def _on_all(array: np.ndarray, place: jax.sharding.Sharding) -> jax.Array:
    """Return an array on the devices of a sharding. `jax.device_put` would compare it with those of all hosts, in a collective."""
    return jax.make_array_from_callback(array.shape, place, lambda part: array[part])


def make_measurement(
    skeleton: ModelSkeleton, sharding: Sharding, num_ranks: int, cache: ProgramCache
) -> KVScaleMeasurement | None:
    """Load or compile the program; None if no scales are measured. num_ranks: groups of devices that split the pages."""
    names = [leaf.name for leaf in skeleton.leaves for _ in leaf.arrays]
    if not any(leaf.is_measured for leaf in skeleton.leaves):
        return None
    # XLA's attention keeps pages as `group_shapes` describes them, on every device.
    policy = replace(skeleton.policy, attention="reference", kv_scales=None)
    plain = make_skeleton(skeleton.config, policy, skeleton.adapters)
    program, shapes = _program(plain, num_ranks)
    model = (plain.config, plain.policy, plain.adapters, abstract_params(plain, sharding))
    key = program_key(host_key_parts() | process_key_parts(), "KV scales", *model, sharding, shapes)
    task: Any = replace(GENERATION, step=measure)
    made = compile_all(
        lambda program: lower(plain, sharding, program, shapes, task),
        key,
        sharding,
        [program],
        cache,
        num_threads=1,
        progress=lambda *_: None,
    )
    places = tuple(map(names.index, measured_names(skeleton)))
    return KVScaleMeasurement(places, sharding, shapes, _plan(plain, program), made[program])


def _program(skeleton: ModelSkeleton, num_ranks: int) -> tuple[Program, CacheShapes]:
    """Return the shapes of the program, and those of its cache."""
    config = skeleton.config
    num_tokens = max(PAGE_SIZE, min(NUM_TOKENS, config.max_position) // PAGE_SIZE * PAGE_SIZE)
    num_pages, num_slots = num_tokens // PAGE_SIZE, 2 if config.cache.states else 0
    program = Program("mixed", num_tokens, 1, num_pages, 0, 1, config.cache.num_tables, num_slots)
    counts = (num_ranks * (1 + num_pages if group.has_pages else num_slots) for group in config.cache.groups)
    dtype = skeleton.policy.activations
    return program, tuple(
        group_shapes(group, count, PAGE_SIZE, dtype, dtype)
        for group, count in zip(config.cache.groups, counts, strict=True)
    )


def _plan(skeleton: ModelSkeleton, program: Program) -> Int[np.ndarray, "I"]:
    """Return the packed plan of the program: one row of random tokens, after the one that begins a text if there is one."""
    config, count = skeleton.config, program.num_tokens
    packed = np.zeros(packed_size(program, INPUT_FIELDS), np.int32)
    field = split(packed, program, INPUT_FIELDS)
    field["tokens"][:] = np.random.default_rng(0).integers(0, config.vocab_size, count)
    if config.bos_token_id is not None:
        field["tokens"][0] = config.bos_token_id
    field["positions"][:] = np.arange(count)
    field["is_real"][:] = 1
    field["query_starts"][:] = 0, count
    field["kv_lengths"][:] = count
    field["block_tables"][:] = 1 + np.arange(program.num_tables * program.max_pages) % program.max_pages
    if program.num_state_slots:
        field["state_writes"][:] = 1
    return packed
