"""The kernel over latent vectors for Hopper, compiled to machine code without a GPU: registers, instructions, memory.

What is asserted is read from the assembler's report and from the disassembly; says nothing about speed or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.latent_attention.api import decode_attention, mixed_attention, unsupported, write_and_attend
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout

from tests.aot.addresses import kernels_given_parts
from tests.aot.devices import H100, H200, Target
from tests.aot.machine_code import MachineCode, machine_code

pytestmark = [pytest.mark.aot, pytest.mark.slow]

BATCH, NUM_TOKENS, NUM_PAGES, MAX_PAGES, NUM_LAYERS = 32, 509, 4096, 8192, 8
"""Rows of up to 131072 tokens."""


@dataclass(frozen=True)
class Launch:
    """The kernel of one step at the shapes of a layer."""

    num_heads: int
    width: int = 576
    value_width: int = 512
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    page_size: int = 16
    is_mixed: bool = False
    target: Target = H200

    def __str__(self) -> str:
        step = "mixed" if self.is_mixed else "decode"
        dtypes = f"{self.dtype}-{self.kv_dtype or self.dtype}"
        return f"{self.target.name}-{step}-{self.num_heads}x{self.width}-page{self.page_size}-{dtypes}"

    @property
    def pool_shape(self) -> tuple[int, ...]:
        return (NUM_LAYERS, NUM_PAGES, 1, self.page_size, self.width)


LAUNCHES = [
    Launch(16),  # DeepSeek-V3 on eight devices
    Launch(20, dtype="float16", is_mixed=True),  # GLM-4.7-Flash: tiles of three tokens
    Launch(16, kv_dtype="float8_e4m3fn", is_mixed=True),
]
MORE_LAUNCHES = [
    Launch(128, page_size=64, target=H100),  # DeepSeek-V3 with all heads on each device
    Launch(32, width=320, value_width=256),  # Mistral Small 4
    Launch(32, width=320, value_width=256, dtype="float16", kv_dtype="float8_e4m3fn"),
]


@pytest.fixture(
    scope="module",
    params=[
        *LAUNCHES,
        *(pytest.param(launch, marks=pytest.mark.exhaustive) for launch in MORE_LAUNCHES),
        pytest.param(Launch(8, is_mixed=True), marks=pytest.mark.newest),
    ],
    ids=str,
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MachineCode:
    launch: Launch = request.param
    return machine_code(launch.target, lambda: _compile(launch), tmp_path_factory.mktemp("mosaic"))


def _compile(launch: Launch, num_tokens: int = NUM_TOKENS) -> jax.stages.Compiled:
    (device,) = launch.target.devices(1)
    sharding = jax.sharding.SingleDeviceSharding(device)
    dtype, kv_dtype = jnp.dtype(launch.dtype), jnp.dtype(launch.kv_dtype or launch.dtype)
    assert unsupported("mosaic_gpu", launch.pool_shape, launch.value_width, dtype, kv_dtype) is None
    scoring = Scoring(launch.width**-0.5)

    def array(*shape: int, dtype: jnp.dtype | type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def decode(q: jax.Array, *pool: jax.Array) -> jax.Array:
        return decode_attention(q, *pool, value_width=launch.value_width, scoring=scoring, backend="mosaic_gpu")

    def mixed(q: jax.Array, *given: jax.Array) -> jax.Array:
        *pool, starts, num_decode = given
        ragged = ragged_layout(starts, num_decode, num_tokens=num_tokens)
        return mixed_attention(q, *pool, ragged, value_width=launch.value_width, scoring=scoring, backend="mosaic_gpu")

    pool = [array(*launch.pool_shape, dtype=kv_dtype), array(), array(BATCH, MAX_PAGES), array(BATCH)]
    q = array(num_tokens if launch.is_mixed else BATCH, launch.num_heads, launch.width, dtype=dtype)
    with jax.default_device(device):
        if launch.is_mixed:
            return jax.jit(mixed).lower(q, *pool, array(BATCH + 1), array()).compile()
        return jax.jit(decode).lower(q, *pool).compile()


def test_no_register_is_spilled(built: MachineCode) -> None:
    assert built.spilled_bytes == 0


def test_matmuls_are_those_of_the_tensor_cores_and_pages_come_by_bulk_copies(built: MachineCode) -> None:
    """One worker multiplies queries with whole vectors, each worker the weights with half of the values."""
    assert "HGMMA.64x64x16" in built.instructions
    assert "HGMMA.64x256x16" in built.instructions or "HGMMA.64x128x16" in built.instructions
    assert "UTMALDG" in built.instructions
    assert "UTMASTG" in built.instructions


def test_what_is_kept_aside_is_small(built: MachineCode) -> None:
    """Partial results of 512 parts, of 128 heads at most; pages of 32 rows of 1,024 tokens would be 38 MB more."""
    assert built.temp_bytes < 140 << 20


@pytest.mark.parametrize(("num_tokens", "has_loop"), [(2 * BATCH, False), (64 * BATCH, True)])
def test_steps_of_few_tokens_a_row_have_no_loop(num_tokens: int, has_loop: bool) -> None:
    """Drafts to verify are such steps: a CUDA graph can hold them. The results of parts of a large step would need too much room."""
    if not H200.has_compiler:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    text = _compile(Launch(128, is_mixed=True), num_tokens).as_text()
    assert text is not None
    assert (" while(" in text) == has_loop
    assert text.count('custom_call_target="mosaic_gpu') == 2


def test_a_step_writes_vectors_in_place_and_copies_no_pages() -> None:
    """The kernel has the pool and whole arrays as operands."""
    (device,) = H200.devices(1) if H200.has_compiler else (None,)
    if device is None:
        pytest.skip(f"{H200.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    def step(q: jax.Array, latents: jax.Array, pages: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        lengths, places, slots, tables = packed[:8], packed[8:16], packed[16:24], packed[24:]
        paging = Paging(tables.reshape(8, -1), lengths, jnp.arange(9), places, slots, None)
        where = (jnp.int32(0), paging)
        options = {"value_width": 512, "scoring": Scoring(0.1), "backend": "mosaic_gpu"}
        return write_and_attend(q, latents, pages, *where, **options)

    pool = array(NUM_LAYERS, NUM_PAGES, 1, 16, 576, dtype="bfloat16")
    q, latents = array(8, 16, 576, dtype="bfloat16"), array(8, 1, 576, dtype="bfloat16")
    with jax.default_device(device):
        compiled = jax.jit(step, donate_argnums=2).lower(q, latents, pool, array(24 + 8 * 64)).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    assert text.count('custom_call_target="mosaic_gpu') == 2
    assert kernels_given_parts(text) == []
    assert memory.alias_size_in_bytes == 2 * pool.size
    assert " copy(" not in "\n".join(line for line in text.splitlines() if str(NUM_PAGES) in line)
