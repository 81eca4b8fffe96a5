"""Matmuls with GGUF blocks and NVFP4 in words for TPUs, compiled without one. Says nothing about speed or numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve_kernels import nvfp4
from jaxserve_kernels.block_kinds import BLOCK_KINDS
from jaxserve_kernels.block_matmul import block_matmul, dequantize_rows, grouped_block_matmul
from jaxserve_kernels.grouped_matmul import grouped_matmul
from jaxserve_kernels.tpu_words import num_words

from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import DtypePolicy
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.array import QuantArray
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.devices import V5E, V5P, V6E, V7X, Target
from tests.aot.test_embed_programs import require_compiler
from tests.aot.test_step_programs import DECODE, SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow]

NVFP4 = "NVFP4"
DECODE_STEP, PROMPT, HEAD, SHARE = (32, 4096, 6144), (2048, 14336, 4096), (8, 4096, 151_936), (40, 768, 2048)
"""Tokens, inputs, outputs."""
MATMULS = [
    *[(target, name, DECODE_STEP) for target in (V5E, V6E) for name in (*BLOCK_KINDS, NVFP4)],
    *[(target, name, shape) for target in (V5E, V7X) for name in ("Q8_0", "Q6_K", NVFP4) for shape in (PROMPT, HEAD)],
    *[(target, name, SHARE) for target in (V5P, V7X) for name in ("Q4_K", "Q5_0", NVFP4)],
]
IN_EVERY_LANE = [
    (V5E, "Q4_K", DECODE_STEP),
    (V6E, "Q6_K", DECODE_STEP),
    (V6E, NVFP4, DECODE_STEP),
    (V7X, "Q8_0", PROMPT),
]


def compiled(target: Target, name: str, shape: tuple[int, int, int]) -> jax.stages.Compiled:
    require_compiler(target)
    mesh = Mesh(np.array(target.devices(1)), ("model",))
    num_tokens, num_inputs, num_outputs = shape

    def array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

    x, multiply = array("bfloat16", num_tokens, num_inputs), partial[jax.Array](nvfp4.matmul, backend="mosaic_tpu")
    weights: list[jax.ShapeDtypeStruct | nvfp4.TwoLevelScales] = [array("int32", num_inputs // 8, num_outputs)]
    if name == NVFP4:
        blocks, matrix = array("float8_e4m3fn", num_inputs // 16, num_outputs), array("float32", 2, num_outputs)
        weights.append(nvfp4.TwoLevelScales(blocks, matrix))
    else:
        kind = BLOCK_KINDS[name]
        multiply = partial(block_matmul, kind=kind, backend="mosaic_tpu")
        weights = [array("int32", num_words(kind, num_inputs), num_outputs)]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(multiply).lower(x, *weights).compile()


@pytest.mark.parametrize(
    ("target", "name", "shape"),
    [
        pytest.param(
            *case,
            id="-".join((case[0].name, case[1], "x".join(map(str, case[2])))),
            marks=[] if case in IN_EVERY_LANE else [pytest.mark.newest],
        )
        for case in MATMULS
    ],
)
def test_words_are_read_where_they_are(target: Target, name: str, shape: tuple[int, int, int]) -> None:
    program = compiled(target, name, shape)
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    weights = rf"= \(?(?:s32|f8e4m3fn)\[\d+,{shape[2]}\]\S* (?:copy|transpose|convert|pad|fusion)\("
    assert re.findall(weights, text) == []
    num_tokens, _, num_outputs = shape
    assert memory.temp_size_in_bytes < 4 * num_tokens * num_outputs + (1 << 20), "no more than the result"


@pytest.mark.parametrize(
    ("target", "num_rows", "num_experts", "num_inputs", "num_outputs"),
    [
        pytest.param(V6E, 256, 128, 2048, 768, id="v6e-few"),
        pytest.param(V5E, 16_384, 128, 768, 2048, id="v5e-many", marks=pytest.mark.newest),
        pytest.param(V5P, 64, 8, 14_336, 4096, id="v5p-large", marks=pytest.mark.newest),
        pytest.param(V7X, 4096, 32, 7168, 2048, id="v7x-many", marks=pytest.mark.newest),
    ],
)
def test_words_of_experts_are_read_where_they_are(
    target: Target, num_rows: int, num_experts: int, num_inputs: int, num_outputs: int
) -> None:
    require_compiler(target)
    mesh = Mesh(np.array(target.devices(1)), ("model",))

    def array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

    words = array("int32", num_experts, num_inputs // 8, num_outputs)
    blocks = array("float8_e4m3fn", num_experts, num_inputs // 16, num_outputs)
    scales = nvfp4.TwoLevelScales(blocks, array("float32", num_experts, 2, num_outputs))
    x, sizes = array("bfloat16", num_rows, num_inputs), array("int32", num_experts)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        multiply = jax.jit(partial(grouped_matmul, backend="mosaic_tpu"))
        program = multiply.lower(x, words, sizes, scales).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    weights = rf"= \(?(?:s32|f8e4m3fn)\[{num_experts},\d+,{num_outputs}\]\S* (?:copy|copy-start|transpose|convert|pad|fusion)\("
    assert re.findall(weights, text) == []
    assert memory.temp_size_in_bytes < 4 * num_experts * num_outputs + (2 << 20)


@pytest.mark.parametrize(
    ("target", "name", "num_rows", "num_inputs", "num_outputs"),
    [
        (V6E, "Q4_K", 256, 2048, 768),
        pytest.param(V5E, "Q6_K", 16_384, 768, 2048, marks=pytest.mark.newest),
        pytest.param(V5P, "Q8_0", 64, 768, 2048, marks=pytest.mark.newest),
        pytest.param(V7X, "Q5_K", 4096, 2048, 768, marks=pytest.mark.newest),
    ],
)
def test_blocks_of_experts_are_read_where_they_are(
    target: Target, name: str, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    """At the shapes of Qwen3-30B-A3B."""
    require_compiler(target)
    kind, mesh, num_experts = BLOCK_KINDS[name], Mesh(np.array(target.devices(1)), ("model",)), 128

    def array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

    words = array("int32", num_experts, num_words(kind, num_inputs), num_outputs)
    x, sizes = array("bfloat16", num_rows, num_inputs), array("int32", num_experts)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        multiply = jax.jit(partial(grouped_block_matmul, kind=kind, backend="mosaic_tpu"))
        program = multiply.lower(x, words, sizes).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None and memory is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    weights = rf"= \(?s32\[{num_experts},\d+,{num_outputs}\]\S* (?:copy|copy-start|transpose|convert|pad|fusion)\("
    assert re.findall(weights, text) == []
    assert memory.temp_size_in_bytes < 2 << 20


@pytest.mark.parametrize(
    ("target", "num_tokens"), [(V6E, 32), *[pytest.param(each, 2048, marks=pytest.mark.newest) for each in (V5E, V7X)]]
)
def test_looking_up_embeddings_copies_no_table(target: Target, num_tokens: int) -> None:
    """XLA alone would copy all of it, 515 MB, whose columns are the rows of the table."""
    require_compiler(target)
    kind, mesh = BLOCK_KINDS["Q6_K"], Mesh(np.array(target.devices(1)), ("model",))
    place = NamedSharding(mesh, PartitionSpec())
    words = jax.ShapeDtypeStruct((num_words(kind, 4096), 151_936), jnp.int32, sharding=place)
    indices = jax.ShapeDtypeStruct((num_tokens,), jnp.int32, sharding=place)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lookup = jax.jit(dequantize_rows, static_argnames=("kind", "backend"))
        program = lookup.lower(kind=kind, blocks=words, rows=indices, backend="mosaic_tpu").compile()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 64 << 20


@pytest.mark.exhaustive
def test_devices_that_share_a_table_copy_none_of_it() -> None:
    """Two devices, each with half of 570 MB: more than fits VMEM."""
    require_compiler(V6E)
    model, dtype = replace(SMALL, layers=SMALL.layers[:1], vocab_size=262_144, hidden_size=2048), jnp.dtype("bfloat16")
    quant = QuantPolicy("gguf-weight-only", stored_kinds=(("model.embed_tokens", "Q8_0"),), platform="tpu")
    shape = MeshShape(2)
    skeleton = make_skeleton(model, DtypePolicy(dtype, dtype, quant, "mosaic_tpu", mesh=shape))
    (table,) = (leaf.declared for leaf in skeleton.leaves if leaf.name == "model.embed_tokens.weight")
    sharding = make_sharding(model, shape, V6E.devices(2))
    pool = (model.num_layers, 256, model.num_kv_heads, page_tokens("tpu", None), model.head_dim)
    text = lower(skeleton, sharding, DECODE, pool_shapes(pool, "bfloat16")).compile().as_text()
    assert text is not None
    (spec,) = table.arrays if isinstance(table, QuantArray) else (table,)
    num_rows, num_columns = spec.shape[0], spec.shape[1] // 2
    assert f"s32[{num_rows},{num_columns}]" in text
    assert re.findall(rf"= s32\[{num_rows},{num_columns}\]\S* (?:copy|transpose|fusion)\(", text) == []


@pytest.mark.parametrize("quantization", ["gguf", "gguf-weight-only", "nvfp4-weight-only"])
def test_all_matmuls_of_a_step_take_the_kernel(quantization: str) -> None:
    """The head's matmul is one of them; with NVFP4 it has 8 bits."""
    require_compiler(V6E)
    model, dtype = replace(SMALL, layers=SMALL.layers[:1]), jnp.dtype("bfloat16")
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    kinds = tuple((f"model.layers.0.{part}_proj", "Q6_K" if part == "mlp.down" else "Q4_K") for part in parts)
    stored = (*kinds, ("model.embed_tokens", "Q6_K")) if quantization.startswith("gguf") else ()
    quant = QuantPolicy(quantization, stored_kinds=stored, platform="tpu")
    skeleton = make_skeleton(model, DtypePolicy(dtype, dtype, quant, "mosaic_tpu"))
    sharding = make_sharding(model, MeshShape(), V6E.devices(1))
    pool = (model.num_layers, 256, model.num_kv_heads, page_tokens("tpu", None), model.head_dim)
    lowered = lower(skeleton, sharding, DECODE, pool_shapes(pool, "bfloat16")).as_text()
    assert lowered.count("call @block_matmul" if stored else "call @numbers_matmul") == len(parts) + bool(stored)
    assert lowered.count("call @columns") == bool(stored)
    assert lowered.count("dot_general") == (0 if stored else 1)
