"""The kernel that updates recurrent states, compiled to machine code without a GPU: registers, states in place.

Says nothing about speed; numbers are those of tests/ptx.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.linear_attention import PooledStates, linear_attention
from jaxserve_kernels.linear_attention.gpu import FEWEST_TOKENS
from jaxserve_kernels.segments import cut_segments, decode_segments

from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import H200, Target
from tests.aot.machine_code import machine_code

pytestmark = [pytest.mark.aot, pytest.mark.slow]

NUM_ROWS, NUM_TOKENS, NUM_LAYERS, NUM_SLOTS = 32, FEWEST_TOKENS, 2, 97


@dataclass(frozen=True)
class Shape:
    """The heads of one layer."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_rate: bool
    is_decode: bool = True
    target: Target = H200

    def __str__(self) -> str:
        heads = f"{self.num_key_heads}x{self.key_dim}-{self.num_value_heads}x{self.value_dim}"
        form, kind = "delta" if self.has_rate else "sum", "decode" if self.is_decode else "mixed"
        return f"{self.target.name}-{kind}-{heads}-{form}"

    @property
    def pool(self) -> tuple[int, ...]:
        return NUM_LAYERS, NUM_SLOTS, self.num_value_heads, self.key_dim, self.value_dim


QWEN = Shape(16, 32, 128, 128, has_rate=True)
"""The gated delta nets of Qwen3-Next and Qwen3.6-35B-A3B."""
SHAPES = [
    replace(shape, is_decode=is_decode)
    for shape in (QWEN, Shape(8, 128, 128, 64, has_rate=False), Shape(1, 4, 256, 64, has_rate=True))
    for is_decode in (True, False)
]


def compiled(shape: Shape) -> jax.stages.Compiled:
    """Compile a step of 32 rows: of one token each, or of the fewest that are computed in chunks."""
    (device,) = shape.target.devices(1)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*dims: int, dtype: jnp.dtype | type = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    def update(keys: jax.Array, values: jax.Array, gates: jax.Array, pool: jax.Array, plan: jax.Array) -> jax.Array:
        q, k = keys
        rows = PooledStates(pool, 1, plan[:NUM_ROWS], plan[NUM_ROWS : 2 * NUM_ROWS])
        rate = gates[1] if shape.has_rate else None
        starts = plan[2 * NUM_ROWS :]
        positions = jnp.zeros(NUM_ROWS, jnp.int32)
        segments = (
            decode_segments(starts)
            if shape.is_decode
            else cut_segments(starts, positions, jnp.int32(0), num_tokens=NUM_TOKENS)
        )
        out, after = linear_attention(q, k, values, -gates[0], rate, rows, segments, backend="mosaic_gpu")
        assert isinstance(after, PooledStates)
        return out, after.pool

    num_tokens = NUM_ROWS if shape.is_decode else NUM_TOKENS
    arguments = (
        array(2, num_tokens, shape.num_key_heads, shape.key_dim),
        array(num_tokens, shape.num_value_heads, shape.value_dim, dtype=jnp.bfloat16),
        array(2, num_tokens, shape.num_value_heads),
        array(*shape.pool),
        array(3 * NUM_ROWS + 1, dtype=jnp.int32),
    )
    with jax.default_device(device):
        return jax.jit(update, donate_argnums=3).lower(*arguments).compile()


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
def test_heads_of_80_numbers_stay_in_registers(is_decode: bool, tmp_path: Path) -> None:
    """Heads of Nemotron-H take tokens in turn: 20 columns of a warp are no rows of its matmuls."""
    shape = Shape(8, 128, 128, 80, has_rate=False, is_decode=is_decode)
    code = machine_code(shape.target, lambda: compiled(shape), tmp_path)
    assert code.num_kernels == 1
    assert code.spilled_bytes == 0


@pytest.mark.parametrize(
    "shape",
    [*SHAPES[:2], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in SHAPES[2:5]), SHAPES[5]],
    ids=str,
)
def test_states_stay_in_registers_and_move_in_vectors(shape: Shape, tmp_path: Path) -> None:
    code = machine_code(shape.target, lambda: compiled(shape), tmp_path)
    assert code.num_kernels == (1 if shape.is_decode else 2)
    # Around the loop over chunks, not in it, a few addresses; with 256 rows of a state a few more.
    assert code.spilled_bytes <= (0 if shape.is_decode else 2 * shape.key_dim)
    per_thread = shape.key_dim // 8  # vectors of four numbers
    for opcode in ("LD.E.128", "ST.E.128"):
        assert code.instructions.count(opcode) >= per_thread
    assert code.instructions.count("HMMA.16816.F32.BF16") == (0 if shape.is_decode else _num_matmuls(shape))


def _num_matmuls(shape: Shape) -> int:
    """Return the matmuls of a warp for a chunk: three for each of a right operand's 32 x 32 numbers, of eight instructions."""
    blocks = shape.key_dim // 32
    return 3 * 8 * (3 * blocks + 2 if shape.has_rate else 2 * blocks + 1)


@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
def test_states_are_updated_in_their_pool(is_decode: bool) -> None:
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    # Another kernel than those of other tests: a process assembles each once.
    program = compiled(replace(QWEN, num_value_heads=48, is_decode=is_decode))
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    pool_bytes = 4 * NUM_LAYERS * NUM_SLOTS * 48 * 128 * 128
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // (40 if is_decode else 10)
    assert " copy(" not in "\n".join(line for line in text.splitlines() if str(NUM_SLOTS) in line)
    assert kernels_given_parts(text) == []
    assert " while(" not in text


def test_the_lower_parts_of_operands_are_more_than_zeros() -> None:
    """XLA leaves out a conversion to bfloat16 and back, and subtracts a number from itself, unless the rounding is an operation."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    text = compiled(replace(QWEN, num_value_heads=16, is_decode=False)).as_text()
    assert text is not None
    differences = re.findall(r"subtract\((%[\w.-]+), (%[\w.-]+)\)", text)
    assert len(differences) >= 5, "of queries, keys in two orders, and two matrices between tokens"
    assert all(first != second for first, second in differences)
