"""The kernels for Hopper, compiled to machine code without a GPU: registers, shared memory, instructions.

What is asserted is read from the assembler's report and from the disassembly; says nothing about speed or numbers.
"""

from __future__ import annotations

import importlib
import re
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxserve_kernels.kv_write import kv_write
from jaxserve_kernels.paged_attention import Scoring, decode_attention, mixed_attention, ragged_layout

from tests.aot.devices import H200, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow]

BATCH, NUM_TOKENS, NUM_PAGES, MAX_PAGES, NUM_LAYERS, PAGE_SIZE = 32, 512, 4096, 256, 8, 16
BF16, F16, F8, I8 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float8_e4m3fn", "int8"))
_MOST_SPILLED = {256: 400}
"""Bytes, by head dimension: two accumulators of 64 x 256 numbers leave few registers for addresses."""


@dataclass(frozen=True)
class Launch:
    """One kernel at the shapes of a layer."""

    kernel: str
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
        name = f"{self.target.name}-{self.kernel}-{heads}-page{self.page_size}-{self.dtype.name}-{self.kv_dtype.name}"
        return f"{name}-{extras}" if extras else name

    @property
    def pool_shape(self) -> tuple[int, ...]:
        return (NUM_LAYERS, NUM_PAGES, self.num_kv_heads, self.page_size, self.dim)


BOTH = ("decode", "prefill")
LAUNCHES = [
    *(Launch(kernel, dim=dim) for kernel in BOTH for dim in (64, 80, 96, 128, 256)),
    *(Launch(kernel, kv_dtype=F8) for kernel in BOTH),
    *(Launch(kernel, dim=64, dtype=F16, kv_dtype=I8, num_heads=9, num_kv_heads=3) for kernel in BOTH),
    *(Launch(kernel, sliding_window=1024, softcap=50.0, has_sinks=True, page_size=128) for kernel in BOTH),
    Launch("decode", dim=80, kv_dtype=I8, num_heads=64, num_kv_heads=1),
]


@dataclass(frozen=True)
class Built:
    """What the tools say of a kernel."""

    launch: Launch
    spilled_bytes: int
    instructions: str
    temp_bytes: int


@pytest.fixture(scope="module", params=LAUNCHES, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    launch: Launch = request.param
    if not launch.target.has_compiler:
        pytest.skip(f"{launch.target.compiler} is not installed: nothing compiled for GPUs (make kernels-check)")
    toolkit = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    if not (toolkit / "bin" / "nvdisasm").exists():
        pytest.skip("nvidia-cuda-nvdisasm is not installed: nothing to read the machine code with (make kernels-check)")
    dumps = tmp_path_factory.mktemp("mosaic")
    with pytest.MonkeyPatch.context() as patch:
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")  # it sets the next variable when it is imported
        patch.setenv("MOSAIC_GPU_CUDA_ROOT", str(toolkit))
        patch.setenv("MOSAIC_GPU_DUMP_TO", str(dumps))
        for what in ("PTXAS", "SASS"):
            patch.setenv(f"MOSAIC_GPU_DUMP_{what}", "1")
        memory = _compile(launch).memory_analysis()
    report = "".join(file.read_text(errors="replace") for file in dumps.glob("*.ptxas"))
    code = "".join(file.read_text(errors="replace") for file in dumps.glob("*sass*"))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills, "the assembler reported nothing"
    assert memory is not None
    return Built(launch, sum(int(count) for pair in spills for count in pair), code, memory.temp_size_in_bytes)


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

    def prefill(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> jax.Array:
        *where, sinks, starts = rows
        ragged = ragged_layout(starts, jnp.int32(0), num_tokens=NUM_TOKENS, backend="mosaic_gpu")
        return mixed_attention(q, k, v, *where, ragged, **options, sinks=sinks if launch.has_sinks else None)

    is_decode = launch.kernel == "decode"
    q = array(BATCH if is_decode else NUM_TOKENS, launch.num_heads, launch.dim, dtype=launch.dtype)
    arguments = (q, *pool, *rows) if is_decode else (q, *pool, *rows, array(BATCH + 1))
    with jax.default_device(device):
        return jax.jit(decode if is_decode else prefill).lower(*arguments).compile()


def test_no_register_is_spilled(built: Built) -> None:
    assert built.spilled_bytes <= _MOST_SPILLED.get(built.launch.dim, 0)


def test_products_are_those_of_the_tensor_cores_and_pages_come_by_bulk_copies(built: Built) -> None:
    assert "HGMMA" in built.instructions
    assert "UTMALDG" in built.instructions
    assert "UTMASTG" in built.instructions


def test_what_is_kept_aside_is_small(built: Built) -> None:
    """Partial results, and queries padded for whole tiles."""
    assert built.temp_bytes < 48 << 20


@pytest.mark.parametrize("kv_dtype", [BF16, F8, I8], ids=str)
def test_writing_keys_and_values_is_in_place(kv_dtype: jnp.dtype) -> None:
    launch = replace(LAUNCHES[0], kv_dtype=kv_dtype)
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
