"""Compiled steps never copy the pools of the cache, and their dispatch stays cheap."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels import native
from jaxserve_kernels.backend import Backend

from jaxserve.layers.cache import KVPool, group_shapes, pool_shapes
from jaxserve.layers.policy import plain
from jaxserve.model_config.decoder import DecoderConfig, LayerConfig
from jaxserve.model_config.recurrent import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    Mamba2Config,
    RecurrentConfig,
    ShortConvConfig,
)
from jaxserve.models.skeleton import ModelSkeleton, make_skeleton
from jaxserve.runner.inputs import INPUT_FIELDS, Program, packed_size
from jaxserve.runner.slots import slots_shape
from jaxserve.runner.state import StateArrays
from jaxserve.runner.steps import GENERATION, lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.call_counts import CallCounts
from tests.engine.quick_sampler import quick_programs

CONFIG = DecoderConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerConfig(), LayerConfig(sliding_window=64), LayerConfig(use_rope=False)),
    max_position=1024,
    norm_eps=1e-5,
    rope_theta=10000.0,
    tied_embeddings=True,
    qk_norm="heads",
)
POOL = (3, 2000, 2, 16, 16)
SHAPES = pool_shapes(POOL, "float32")
PROGRAMS = [
    Program("decode", 1, 1, 64, num_slots=8),
    Program("decode", 8, 8, 64, num_slots=8, max_steps=4),
    Program("mixed", 64, 8, 64, num_slots=8),
]


@pytest.fixture(scope="module")
def skeleton() -> ModelSkeleton:
    return make_skeleton(CONFIG, plain(jnp.dtype("float32")))


Lower = Callable[[Program, int], jax.stages.Lowered]


@pytest.fixture(scope="module")
def lowered(skeleton: ModelSkeleton) -> Lower:
    """The programs, each lowered once; those that are not FAST have the sampler of `quick_programs`, which compiles in half of the time."""
    made: dict[tuple[Program, int], jax.stages.Lowered] = {}

    def find(program: Program, size: int) -> jax.stages.Lowered:
        if (program, size) not in made:
            has_all_options = (program.name, size) in FAST
            with contextlib.nullcontext() if has_all_options else quick_programs():
                made[program, size] = lower(skeleton, make_sharding(CONFIG, MeshShape(size)), program, SHAPES)
        return made[program, size]

    return find


FAST = {("decode/8", 1)}
"""Programs and numbers of devices of the fast tests."""
IN_PLACE = [
    pytest.param(
        program,
        size,
        id=f"{program.name} on {size}",
        marks=[] if (program.name, size) in FAST else [pytest.mark.slow, pytest.mark.versions][:size],
    )
    for program in PROGRAMS
    for size in (1, 2)
]


@pytest.mark.parametrize(("program", "size"), IN_PLACE)
def test_the_kv_pool_is_updated_in_place(lowered: Lower, program: Program, size: int) -> None:
    compiled = lowered(program, size).compile()
    memory = compiled.memory_analysis()
    pool_bytes = prod(POOL) * 4 // size
    layer_bytes = pool_bytes // POOL[0]
    slots_bytes = prod(slots_shape(program.num_slots, CONFIG.vocab_size)) * 4
    assert memory.alias_size_in_bytes == 2 * pool_bytes + slots_bytes
    assert memory.temp_size_in_bytes < layer_bytes, "something of the size of a layer's cache is kept aside"
    local = (*POOL[:2], POOL[2] // size, *POOL[3:])
    shape = re.escape(f"f32[{','.join(map(str, local))}]")
    copies = re.findall(rf"= {shape}\S* copy\(", compiled.as_text())
    assert not copies


MIXERS = (
    GatedDeltaConfig(2, 4, 16, 16, 4, "by_part"),
    KimiDeltaConfig(2, 16, 4),
    Mamba2Config(4, 16, 2, 16, 4, False, True, "gate_first"),
    ShortConvConfig(64, 3, False),
)
NUM_SLOTS = 37
"""Slots of recurrent states."""
ONE_ROW = (
    replace(PROGRAMS[0], max_steps=4),
    Program("speculate", 1, 1, 64, num_slots=8, max_steps=3),
)
"""Programs in which XLA fuses the read of a state with the write of it, and copies the pool: kernels have to hold what it does not."""
IN_CI = ((0, ONE_ROW[0]), (1, ONE_ROW[1]), (2, PROGRAMS[2]), (2, PROGRAMS[1]), (3, ONE_ROW[0]))
"""Each mixer once and each program once; `make exhaustive` compiles the others."""
RECURRENT = [
    pytest.param(
        mixer,
        program,
        backend,
        id=f"{type(mixer).__name__}-{program.name}-{backend}",
        marks=[pytest.mark.slow, *([] if (MIXERS.index(mixer), program) in IN_CI else [pytest.mark.exhaustive])],
    )
    for mixer in MIXERS
    for program, backend in (*((each, "native") for each in (*ONE_ROW, PROGRAMS[2])), (PROGRAMS[1], "reference"))
]


@pytest.mark.parametrize(("mixer", "program", "backend"), RECURRENT)
def test_recurrent_states_are_updated_in_place(mixer: RecurrentConfig, program: Program, backend: Backend) -> None:
    if backend == "native" and native.register() is None:
        pytest.skip("the native kernels are not built")
    program = replace(program, num_state_slots=NUM_SLOTS)
    layers = (LayerConfig(has_kv=False, recurrent=mixer),) * 2
    config = replace(CONFIG, layers=(*layers, LayerConfig()))
    policy = replace(plain(jnp.dtype("float32")), backend=backend)
    shapes = tuple(
        group_shapes(group, POOL[1] if group.has_pages else NUM_SLOTS, POOL[3], "float32", "float32")
        for group in config.cache.groups
    )
    with quick_programs():
        compiled = lower(make_skeleton(config, policy), make_sharding(config, MeshShape()), program, shapes).compile()
    text = compiled.as_text()
    pools = [",".join(map(str, array.shape)) for group in shapes for array in group.arrays]
    assert all(f"[{pool}]" in text for pool in pools)
    assert [pool for pool in pools if re.search(rf"= \w+\[{re.escape(pool)}\]\S* copy\(", text)] == []


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_float32_is_multiplied_as_float32_on_every_device(lowered: Lower, program: Program) -> None:
    """Left to itself, a TPU would round the factors to bfloat16, and a GPU to TF32."""
    text = lowered(program, 1).as_text()
    matmuls = re.findall(r"stablehlo\.dot_general .*", text)
    assert matmuls
    assert [matmul for matmul in matmuls if "precision = [HIGHEST, HIGHEST]" not in matmul] == []


def test_dispatch_costs_no_more_than_the_bare_arrays(skeleton: ModelSkeleton) -> None:
    """Count the calls of a step call and of one over a bare tuple of the same leaves: no module is on the hot path."""
    program = PROGRAMS[0]

    def touch(params: tuple[jax.Array, ...]) -> jax.Array:
        return sum(leaf.ravel()[:1].astype(jnp.int32) for leaf in params)

    def step(skeleton: ModelSkeleton, params: Any, state: StateArrays, packed: Any, program: Program) -> Any:
        return state, (touch(params) + packed[:1],)

    task = replace(GENERATION, step=step)
    compiled = lower(skeleton, make_sharding(CONFIG, MeshShape()), program, SHAPES, task=task).compile()

    def bare(params: Any, state: StateArrays, packed: jax.Array) -> Any:
        return state, (touch(params) + packed[:1],)

    params = tuple(jax.device_put(np.zeros(array.shape, array.dtype)) for array in skeleton.arrays)
    packed = np.zeros(packed_size(program, INPUT_FIELDS), np.int32)

    def new_state() -> StateArrays:
        slots = jnp.zeros(slots_shape(program.num_slots, CONFIG.vocab_size), jnp.int32)
        return StateArrays((KVPool(jnp.zeros(POOL), jnp.zeros(POOL)),), slots)

    plain = jax.jit(bare, donate_argnums=1).lower(params, new_state(), packed).compile()

    def calls_of(executable: jax.stages.Compiled) -> CallCounts:
        arguments = (params, new_state())
        if executable is compiled:
            arguments = jax.device_put(arguments, compiled.input_shardings[0][:2])
        leaves, state = arguments
        state, _ = executable(leaves, state, packed)  # now jax has its fast path
        with CallCounts() as calls:
            executable(leaves, state, packed)
        return calls

    of_step, of_plain = calls_of(compiled), calls_of(plain)
    assert of_step == of_plain
    assert of_step.total() < 10
