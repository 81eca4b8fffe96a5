"""The kernels for Hopper, compiled to machine code without a GPU: registers, shared memory, instructions.

What is asserted is read from the assembler's report and from the disassembly; says nothing about speed or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.paged_attention import Scoring, decode_attention, mixed_attention, ragged_layout
from jaxserve_kernels.paged_attention.gpu import join_kernel

from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import H100, H200, Target
from tests.aot.machine_code import MachineCode, machine_code

pytestmark = [pytest.mark.aot, pytest.mark.slow]

BATCH, NUM_TOKENS, NUM_PAGES, MAX_PAGES, NUM_LAYERS, PAGE_SIZE = 32, 509, 4096, 8192, 8, 16
"""Rows of up to 131072 tokens; tokens that fill no tile of eight rows, in which memory is copied."""
BF16, F16, F8, I8 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float8_e4m3fn", "int8"))


@dataclass(frozen=True)
class Launch:
    """The kernels of one step at the shapes of a layer."""

    step: str
    dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    dtype: jnp.dtype = BF16
    kv_dtype: jnp.dtype = BF16
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    page_size: int = PAGE_SIZE
    target: Target = H200

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.dim}"
        extras = f"{self.sliding_window or ''}{self.softcap or ''}{'sinks' if self.has_sinks else ''}"
        name = f"{self.target.name}-{self.step}-{heads}-page{self.page_size}-{self.dtype.name}-{self.kv_dtype.name}"
        return f"{name}-{extras}" if extras else name

    @property
    def pool_shape(self) -> tuple[int, ...]:
        return (NUM_LAYERS, NUM_PAGES, self.num_kv_heads, self.page_size, self.dim)


LAUNCHES = [
    Launch("mixed"),
    Launch("mixed", dim=64, dtype=F16, kv_dtype=I8, num_heads=9, num_kv_heads=3),
    # Fewest registers are left where sums are of 256 numbers, and keys and values are widened and masked.
    Launch("mixed", dim=256, kv_dtype=I8, sliding_window=1024, softcap=50.0, has_sinks=True),
    Launch("decode", dim=80, kv_dtype=I8, num_heads=64, num_kv_heads=1, target=H100),
]
NEWEST_LAUNCHES = [
    Launch("mixed", kv_dtype=F8),
]
MORE_LAUNCHES = [
    *(Launch("mixed", dim=dim) for dim in (64, 80, 96, 256)),
    Launch("mixed", kv_dtype=F8, dim=256),
    Launch("mixed", sliding_window=1024, softcap=50.0, has_sinks=True, page_size=128, target=H100),
    Launch("mixed", dim=256, dtype=F16, kv_dtype=I8, sliding_window=1024, softcap=50.0, has_sinks=True),
    Launch("mixed", dim=256, dtype=F16, kv_dtype=F8, page_size=128),
]


@dataclass(frozen=True)
class Built:
    """A kernel, and what the tools say of it."""

    launch: Launch
    code: MachineCode
    num_launches: int


@pytest.fixture(
    scope="module",
    params=[
        *LAUNCHES,
        *(pytest.param(launch, marks=pytest.mark.newest) for launch in NEWEST_LAUNCHES),
        *(pytest.param(launch, marks=[pytest.mark.newest, pytest.mark.exhaustive]) for launch in MORE_LAUNCHES),
    ],
    ids=str,
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    launch: Launch = request.param
    texts: list[str] = []

    def compiled() -> jax.stages.Compiled:
        made = _compile(launch)
        texts.append(made.as_text() or "")
        return made

    code = machine_code(launch.target, compiled, tmp_path_factory.mktemp("mosaic"))
    return Built(launch, code, texts[0].count('custom_call_target="mosaic_gpu'))


def _compile(launch: Launch) -> jax.stages.Compiled:
    (device,) = launch.target.devices(1)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: jnp.dtype | type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    options = {"scoring": Scoring(launch.dim**-0.5, launch.softcap, launch.sliding_window), "backend": "mosaic_gpu"}
    pool = [array(*launch.pool_shape, dtype=launch.kv_dtype)] * 2
    rows = [array(), array(BATCH, MAX_PAGES), array(BATCH), array(launch.num_heads, dtype=jnp.float32)]

    def decode(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> jax.Array:
        *where, sinks = rows
        return decode_attention(q, k, v, *where, **options, sinks=sinks if launch.has_sinks else None)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> jax.Array:
        *where, sinks, starts, num_decode = rows
        ragged = ragged_layout(starts, num_decode, num_tokens=NUM_TOKENS, backend="mosaic_gpu")
        return mixed_attention(q, k, v, *where, ragged, **options, sinks=sinks if launch.has_sinks else None)

    is_decode = launch.step == "decode"
    q = array(BATCH if is_decode else NUM_TOKENS, launch.num_heads, launch.dim, dtype=launch.dtype)
    arguments = (q, *pool, *rows) if is_decode else (q, *pool, *rows, array(BATCH + 1), array())
    with jax.default_device(device):
        return jax.jit(decode if is_decode else mixed).lower(*arguments).compile()


def test_a_mixed_step_has_both_kernels(built: Built) -> None:
    """Parts of decode rows are joined: by XLA if the heads are no whole programs."""
    launch = built.launch
    of_decode = 1 + join_kernel.has_kernel(launch.num_heads, launch.dim)
    assert built.num_launches == of_decode + (launch.step == "mixed")


def test_no_register_is_spilled(built: Built) -> None:
    assert built.code.spilled_bytes == 0


def test_matmuls_are_those_of_the_tensor_cores_and_pages_come_by_bulk_copies(built: Built) -> None:
    assert "HGMMA" in built.code.instructions
    assert "UTMALDG" in built.code.instructions
    assert "UTMASTG" in built.code.instructions


def test_what_is_kept_aside_is_small(built: Built) -> None:
    """Partial results, and queries padded for whole tiles."""
    assert built.code.temp_bytes < 48 << 20


def test_page_tables_that_are_part_of_a_plan_are_copied() -> None:
    """XLA would give the kernels the address of that part: the plan of a kernel self-test of one layer is such a case."""
    (device,) = H100.devices(1) if H100.has_compiler else (None,)
    if device is None:
        pytest.skip(f"{H100.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    sharding = jax.sharding.SingleDeviceSharding(device)
    rows, pages, num_tokens = 2, 64, 8

    def array(*shape: int, dtype: jnp.dtype | type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def mixed(q: jax.Array, k: jax.Array, v: jax.Array, packed: jax.Array) -> jax.Array:
        starts, lengths, tables = packed[1 : rows + 2], packed[rows + 2 : 2 * rows + 2], packed[2 * rows + 2 :]
        ragged = ragged_layout(starts, packed[0], num_tokens=num_tokens, backend="mosaic_gpu")
        where = (jnp.int32(0), tables.reshape(rows, pages), lengths, ragged)
        return mixed_attention(q, k, v, *where, scoring=Scoring(0.1), backend="mosaic_gpu")

    pool = array(1, 128, 2, 16, 128, dtype=BF16)
    operands = (array(num_tokens, 4, 128, dtype=BF16), pool, pool, array(2 * rows + 2 + rows * pages))
    with jax.default_device(device):
        text = jax.jit(mixed).lower(*operands).compile().as_text()
    assert text is not None
    assert text.count('custom_call_target="mosaic_gpu') == 3
    assert kernels_given_parts(text) == []


@pytest.mark.parametrize("kv_dtype", [BF16, F8, I8], ids=str)
def test_writing_keys_and_values_is_in_place(kv_dtype: jnp.dtype) -> None:
    launch = Launch("mixed", dim=64, kv_dtype=kv_dtype)
    if not launch.target.has_compiler:
        pytest.skip(f"{launch.target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    sharding = jax.sharding.SingleDeviceSharding(launch.target.devices(1)[0])

    def array(*shape: int, dtype: jnp.dtype | type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    new = array(NUM_TOKENS, launch.num_kv_heads, launch.dim, dtype=BF16)
    pool = array(*launch.pool_shape, dtype=kv_dtype)
    arguments = (pool, pool, array(), new, new, array(NUM_TOKENS), array(NUM_TOKENS))
    compiled = jax.jit(kv_write, donate_argnums=(0, 1)).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    size = 2 * kv_dtype.itemsize * pool.size
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size // 100
    assert " copy(" not in "\n".join(line for line in text.splitlines() if str(NUM_PAGES) in line)
