"""The TPU kernels, compiled by the compiler of TPUs, alone, for every chip and type; test_step_programs.py has steps.

What the interpreter does not show: that layouts, VMEM and scalar memory suffice, and that the pool is not copied.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import Paging, Scoring, pool_heads, ragged_layout, write_and_attend

from jaxserve.runner.buckets import page_tokens
from tests.aot.devices import V5E, V5P, V6E, V7X, Target

pytestmark = [pytest.mark.aot, pytest.mark.slow]
LAYERS = 4


def need(target: Target) -> None:
    if not target.has_compiler:
        pytest.skip(f"{target.compiler} is not installed: nothing compiled for {target.name} (make kernels-check)")


@dataclass(frozen=True)
class Op:
    """One call of the op for many long rows: 256 tables of 128k tokens are larger than scalar memory."""

    num_tokens: int | None = None
    """Tokens of a mixed step; None: a decode step."""
    kv_dtype: str = "bfloat16"
    num_heads: int = 32
    num_kv_heads: int = 8
    dim: int = 128
    page_size: int = page_tokens("tpu", None)
    num_pages: int = 4096
    num_rows: int = 256
    max_pages: int = 2048
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        kind = "decode" if self.num_tokens is None else f"mixed{self.num_tokens}"
        window = "" if self.window is None else f"-window{self.window}"
        return f"{kind}-{self.num_heads}/{self.num_kv_heads}x{self.dim}-page{self.page_size}-{self.kv_dtype}{window}"

    @property
    def pool_shape(self) -> tuple[int, ...]:
        heads, dim = pool_heads(self.num_kv_heads, self.dim, "tpu")
        return (LAYERS, self.num_pages, heads, self.page_size, dim)

    def compile(self, target: Target) -> jax.stages.Compiled:
        mesh = Mesh(np.array(target.devices(1)), ("model",))

        def array(*shape: int, dtype: str = "int32") -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec()))

        rows, tokens = self.num_rows, self.num_tokens or self.num_rows
        new = array(tokens, self.num_kv_heads, self.dim, dtype="bfloat16")
        pool = array(*self.pool_shape, dtype=self.kv_dtype)
        ragged = None
        if self.num_tokens is not None:
            starts, number = array(rows + 1), array()
            layout = functools.partial(ragged_layout, num_tokens=tokens, backend="mosaic_tpu")
            ragged = jax.tree.map(lambda x: array(*x.shape), jax.eval_shape(layout, starts, number))
        index = [array(tokens), array(tokens)]
        paging = Paging(array(rows, self.max_pages), array(rows), array(rows + 1), *index, ragged)
        scale = array(self.num_kv_heads, dtype="float32")
        attend = functools.partial(
            write_and_attend,
            scoring=Scoring(self.dim**-0.5, self.softcap, self.window),
            backend="mosaic_tpu",
        )
        scales = KVScales(scale, scale) if pool.dtype.itemsize == 1 else None
        queries = array(tokens, self.num_heads, self.dim, dtype="bfloat16")
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jitted = jax.jit(attend, donate_argnames=("k_pages", "v_pages"))
            lowered = jitted.lower(
                q=queries, k=new, v=new, k_pages=pool, v_pages=pool, layer=array(), paging=paging, scales=scales
            )
        return lowered.compile()


DECODE, MIXED = Op(), Op(2048, max_pages=128)
HEADS_OF_64 = {"num_heads": 32, "num_kv_heads": 8, "dim": 64}
"""Llama-3.2-1B."""
OPS = [
    (V5E, DECODE),
    (V5E, MIXED),
    (V5E, replace(DECODE, kv_dtype="int8")),
    (V7X, replace(MIXED, kv_dtype="float8_e4m3fn", page_size=64)),
    (V6E, replace(DECODE, **HEADS_OF_64)),
]
NEWEST_OPS = [
    (V5E, replace(MIXED, num_kv_heads=32, page_size=128, num_pages=512)),  # Llama-2-7B
    (V5P, MIXED),
    (V5E, replace(DECODE, num_heads=9, num_kv_heads=3, dim=64, window=512, softcap=30.0)),
    (V6E, replace(MIXED, num_heads=64, dim=80, page_size=128)),
]
MORE_OPS = [
    (V5P, DECODE),
    *[(V5E, replace(DECODE, kv_dtype=dtype)) for dtype in ("float8_e4m3fn", "float32")],
    (V5E, replace(MIXED, kv_dtype="int8")),
    (V7X, replace(DECODE, kv_dtype="float8_e4m3fn", page_size=64)),
    (V5P, replace(DECODE, num_kv_heads=32)),
    (V5P, replace(MIXED, num_heads=10, num_kv_heads=1, dim=256, window=4096)),
    (V5E, replace(DECODE, page_size=16, max_pages=8192)),
    (V5E, replace(DECODE, kv_dtype="int8", page_size=48)),
    # Pages whose copies take more VMEM than the compiler grants by itself.
    (V5E, replace(MIXED, page_size=512, num_pages=512, max_pages=16)),
    (V5E, replace(MIXED, num_kv_heads=32, kv_dtype="float32", page_size=256, num_pages=64, max_pages=16)),
    *[(chip, replace(op, **HEADS_OF_64)) for chip, op in ((V5E, MIXED), (V5P, DECODE), (V7X, MIXED))],
]


@pytest.mark.parametrize(
    ("target", "op"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1]}", marks=marks)
        for cases, marks in (
            (OPS, []),
            (NEWEST_OPS, [pytest.mark.newest]),
            (MORE_OPS, [pytest.mark.newest, pytest.mark.exhaustive]),
        )
        for case in cases
    ],
)
def test_the_kernels_compile_and_leave_the_pool_where_it_is(target: Target, op: Op) -> None:
    need(target)
    compiled = op.compile(target)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes == 2 * prod(op.pool_shape) * jnp.dtype(op.kv_dtype).itemsize
    assert text.count('custom_call_target="tpu_custom_call"') == (1 if op.num_tokens is None else 3)
    shape = ",".join(map(str, op.pool_shape))
    assert re.findall(rf"= \(?\w+\[{shape}\]\S* (?:copy|copy-start|transpose|convert|pad)\(", text) == []
