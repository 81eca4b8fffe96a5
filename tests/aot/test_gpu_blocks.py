"""Matmuls with GGUF blocks for Hopper, compiled without a GPU: registers, shared memory, what is written to memory.

Says nothing about speed or numbers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.block_kinds import BLOCK_KINDS, TILE, BlockKind
from jaxserve_kernels.block_matmul import block_matmul, gpu, grouped_block_matmul
from jaxserve_kernels.matmul.gpu.stream import REGISTERS

from benchmarks.gpu.static import launches
from jaxserve.layers.cache import pool_shapes
from jaxserve.layers.policy import DtypePolicy
from jaxserve.models.skeleton import make_skeleton
from jaxserve.quant.policy import QuantPolicy
from jaxserve.runner.buckets import page_tokens
from jaxserve.runner.steps import lower
from jaxserve.sharding.mesh import make_sharding
from jaxserve.sharding.rules import MeshShape
from tests.aot.devices import H200
from tests.aot.machine_code import machine_code
from tests.aot.test_step_programs import DECODE, SMALL

pytestmark = [pytest.mark.aot, pytest.mark.slow]

NUM_OUTPUTS, NUM_INPUTS, NUM_EXPERTS = 4096, 4096, 128
MOST_INSTRUCTIONS = {"Q4_0": 2.8, "Q8_0": 3.1, "Q4_K": 3.6, "Q5_K": 5.2, "Q6_K": 6.2}
"""For each weight, of a step with 8 tokens."""


def operands(kind: BlockKind, num_tokens: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    sharding = jax.sharding.SingleDeviceSharding(H200.devices(1)[0])
    tiles = (NUM_OUTPUTS // TILE, NUM_INPUTS // kind.num_inputs, kind.tile_bytes)
    x = jax.ShapeDtypeStruct((num_tokens, NUM_INPUTS), jnp.bfloat16, sharding=sharding)
    return x, jax.ShapeDtypeStruct(tiles, jnp.uint8, sharding=sharding)


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        ("Q4_K", 8),
        ("Q6_K", 64),
        pytest.param("Q4_0", 8, marks=pytest.mark.newest),
        pytest.param("Q8_0", 8, marks=pytest.mark.newest),
        pytest.param("Q6_K", 8, marks=pytest.mark.newest),
        pytest.param("Q4_K", 128, marks=pytest.mark.newest),
        pytest.param("Q5_K", 8, marks=pytest.mark.newest),
        pytest.param("Q5_1", 64, marks=pytest.mark.newest),
    ],
)
def test_blocks_are_read_as_they_are_stored(
    name: str, num_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    kind, made = BLOCK_KINDS[name], list[jax.stages.Compiled]()
    x, tiles = operands(kind, num_tokens)

    def compiled() -> jax.stages.Compiled:
        def multiply(x: jax.Array, tiles: jax.Array) -> jax.Array:
            return block_matmul(x, tiles, kind=kind, backend="mosaic_gpu")

        made.append(jax.jit(multiply).lower(x, tiles).compile())
        return made[0]

    code, sizes = machine_code(H200, compiled, tmp_path_factory.mktemp("mosaic")), gpu.choice(x, tiles, kind)
    assert sizes is not None
    assert code.spilled_bytes == 0
    (at_start,) = map(int, re.findall(r"Used (\d+) registers", code.instructions))
    of_worker, of_fetcher = REGISTERS[sizes.workers]
    assert at_start * (sizes.workers + 1) == of_worker * sizes.workers + of_fetcher
    assert "HGMMA" in code.instructions and "UTMALDG" in code.instructions
    text = made[0].as_text()
    assert text is not None
    (kernel,) = (launch for launch in launches(text, 0) if launch.read_bytes >= tiles.size)
    assert kernel.read_bytes <= tiles.size + 3 * x.size
    assert max(launch.written_bytes for launch in launches(text, 0)) < tiles.size, "parts of the result"
    if num_tokens == 8:
        assert len(_step(code.instructions)) <= MOST_INSTRUCTIONS[name] * sizes.tile // 2


@pytest.mark.parametrize(
    ("name", "num_rows", "num_outputs", "num_inputs"),
    [
        ("Q4_K", 64, 1536, 2048),
        ("Q6_K", 8, 2048, 768),
        pytest.param("Q4_K", 4096, 1536, 2048, marks=pytest.mark.newest),
        pytest.param("Q6_K", 16_384, 2048, 768, marks=pytest.mark.newest),
        pytest.param("Q4_0", 8, 192, 256, marks=pytest.mark.newest),
        pytest.param("Q8_0", 16_384, 2048, 768, marks=pytest.mark.newest),
        pytest.param("Q5_K", 16_384, 1536, 2048, marks=pytest.mark.newest),
    ],
)
def test_blocks_of_experts_are_read_as_they_are_stored(
    name: str, num_rows: int, num_outputs: int, num_inputs: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """At the shapes of Qwen3-30B-A3B: gate and up, and down, of decode steps and prompts."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    kind, made = BLOCK_KINDS[name], list[jax.stages.Compiled]()
    sharding = jax.sharding.SingleDeviceSharding(H200.devices(1)[0])
    shape = (NUM_EXPERTS, num_outputs // TILE, num_inputs // kind.num_inputs, kind.tile_bytes)
    x = jax.ShapeDtypeStruct((num_rows, num_inputs), jnp.bfloat16, sharding=sharding)
    tiles = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=sharding)
    sizes = jax.ShapeDtypeStruct((NUM_EXPERTS,), jnp.int32, sharding=sharding)

    def compiled() -> jax.stages.Compiled:
        multiply = jax.jit(partial(grouped_block_matmul, kind=kind, backend="mosaic_gpu"))
        made.append(multiply.lower(x, tiles, sizes).compile())
        return made[0]

    code = machine_code(H200, compiled, tmp_path_factory.mktemp("mosaic"))
    assert code.spilled_bytes == 0
    assert "HGMMA" in code.instructions and "UTMALDG" in code.instructions
    text = made[0].as_text()
    assert text is not None
    own = (launch for launch in launches(text, 0) if "fusion" not in launch.name)  # a fusion takes rows from its result
    (kernel,) = (launch for launch in own if launch.read_bytes >= tiles.size)
    assert kernel.read_bytes < tiles.size + 8 * x.size + (1 << 20)


def test_all_matmuls_of_a_decode_step_read_blocks_as_they_are_stored() -> None:
    """The head's matmul is one of them."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    model, dtype = replace(SMALL, layers=SMALL.layers[:1]), jnp.dtype("bfloat16")
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    kinds = tuple((f"model.layers.0.{part}_proj", "Q6_K" if part == "mlp.down" else "Q4_K") for part in parts)
    quant = QuantPolicy("gguf-weight-only", stored_kinds=(*kinds, ("model.embed_tokens", "Q6_K")))
    skeleton = make_skeleton(model, DtypePolicy(dtype, dtype, quant, "mosaic_gpu", fused_for=1))
    sharding = make_sharding(model, MeshShape(), H200.devices(1))
    pool = (model.num_layers, 256, model.num_kv_heads, page_tokens("gpu", None), model.head_dim)
    lowered = lower(skeleton, sharding, DECODE, pool_shapes(pool, "bfloat16")).as_text()
    assert "@mosaic_gpu" in lowered
    assert "dot_general" not in lowered, "a matmul that is left to XLA"


def _step(instructions: str) -> list[str]:
    """Return the opcodes of one step of a worker, but for the last additions: it has half a row's weights of each step."""
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\d+ +)?([A-Z][\w.]+)", instructions)
    matmuls = [place for place, opcode in enumerate(opcodes) if opcode.startswith("HGMMA")]
    wait = max(place for place in range(matmuls[0]) if opcodes[place].endswith("TRYWAIT"))
    return opcodes[wait : matmuls[-1] + 1]
