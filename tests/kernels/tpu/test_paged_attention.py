"""The TPU kernels, interpreted on the CPU with its race detector, against dense softmax, case by case.

The pool holds NaN or huge numbers in all places that must not be read, and the kernels' own memory begins as NaN.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.kv_write import KVScales
from jaxserve_kernels.paged_attention import Paging, pool_heads, ragged_layout, write_and_attend
from jaxserve_kernels.paged_attention.cases import (
    CASES,
    LAYER,
    TOLERANCES,
    Case,
    Operands,
    expected,
    long_row,
    operands,
)
from jaxserve_kernels.paged_attention.tpu import fused, plan, unsupported
from jaxserve_kernels.paged_attention.tpu.plan import (
    BlockSizes,
    Chip,
    Plan,
    Shape,
    chunk_plan,
    decode_plan,
    slots_per_tile,
    write_plan,
)
from jaxserve_kernels.paged_attention.tpu.stream import IDS_PER_LINE

from tests.kernels.tpu_interpreter import QUICKLY, tpu_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.newest]

SCALE = 0.25
"""Scale of 8-bit numbers: a power of two, so that storing them again changes nothing."""
MORE_CASES = (
    Case((1, 20), (40, 37), kv_dtype="int8"),
    Case((1, 1, 1, 1), (16, 17, 0, 100), sliding_window=16),  # a window that ends on a border of pages
    Case((1, 1), (33, 100), num_heads=10, num_kv_heads=1, dtype="float32", page_size=32, softcap=2.0),
    Case((1, 1, 5, 20, 1, 38, 0), (17, 1, 5, 37, 33, 64, 0), dim=128, padding=9, sliding_window=16, has_sinks=True),
    Case((1, 1), (0, 0)),
    Case((1, 1), (17, 40), padding=14, dtype="float32"),
    Case((1, 1, 1), (65, 64, 100), num_heads=6, dim=80, page_size=64),  # heads that share no row; a tile within a page
    Case((1, 1, 70), (129, 63, 90), num_heads=8, num_kv_heads=4, dim=32, page_size=64),  # four heads in a row
    Case((1, 30), (70, 90), page_size=64, kv_dtype="int8", dtype="bfloat16"),
    Case((1, 1), (40, 96), num_heads=2, dim=128, page_size=48, kv_dtype="int8"),  # a page of a tile and a half
)
FAST = tuple(case for case in CASES if case.kv_dtype == "float8_e4m3fn" and not case.is_decode)
SLOW = tuple(case for case in (*CASES, *MORE_CASES) if case.dtype != "float16" and case not in FAST)
"""TPUs compute nothing in float16."""
IN_CI = (*(CASES[i] for i in (0, 2, 5, 6, 8, 12, 14, 16, 17)), *MORE_CASES[::5], MORE_CASES[7])
"""Decode and prefill in both types and over narrow pools, with windows, a softcap and sinks; head dimensions from 64 to 256,
pages of 16 to 64 tokens. `make exhaustive` runs the others."""


class Step(NamedTuple):
    """A case's new tokens, taken out of its pool."""

    k: np.ndarray  # (T, K, H)
    v: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    paging: Paging


def in_pool_heads(pages: np.ndarray) -> np.ndarray:
    """Lay out pages [L, P, K, S, H] with the heads of a pool for TPUs: several side by side, or padded."""
    layers, num_pages, heads, slots, dim = pages.shape
    pool_kv_heads, pool_dim = pool_heads(heads, dim, "tpu")
    if pool_kv_heads == heads:
        return np.pad(pages, [(0, 0)] * 4 + [(0, pool_dim - dim)])
    shared = pages.reshape(layers, num_pages, pool_kv_heads, -1, slots, dim).swapaxes(3, 4)
    return np.ascontiguousarray(shared.reshape(layers, num_pages, pool_kv_heads, slots, pool_dim))


def make_step(case: Case, given: Operands) -> Step:
    starts, num_tokens = given.query_starts, len(given.q)
    pages, slots = np.zeros((2, num_tokens), np.int32)
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        if length:
            positions = np.arange(length - count, length)
            own = slice(starts[row], starts[row] + count)
            pages[own], slots[own] = given.tables[row, positions // case.page_size], positions % case.page_size
    is_real = pages > 0
    taken, pools = [], []
    for pool in (given.k_pages, given.v_pages):
        taken.append(np.where(is_real[:, None, None], pool[LAYER, pages, :, slots], 0).astype(pool.dtype))
        emptied = pool.copy()
        emptied[LAYER, pages[is_real], :, slots[is_real]] = 127 if pool.dtype == np.int8 else np.nan
        pools.append(in_pool_heads(emptied))
    tables, lengths, queries, pages, slots = map(jnp.asarray, (given.tables, given.lengths, starts, pages, slots))
    ragged = None
    if not case.is_decode:
        ragged = ragged_layout(queries, jnp.int32(case.num_decode_rows), num_tokens=num_tokens, backend="mosaic_tpu")
    return Step(*taken, *pools, Paging(tables, lengths, queries, pages, slots, ragged))


def tiny_chip(case: Case, num_cores: int, pages_per_block: int) -> Chip:
    """Few pages a block and 32 tokens a tile, so that a few keys make many."""
    itemsize = jnp.dtype(case.kv_dtype or case.dtype).itemsize
    heads, dim = pool_heads(case.num_kv_heads, case.dim, "tpu")
    page = max(1, heads // num_cores) * case.page_size * dim * itemsize
    return Chip(BlockSizes(pages_per_block * page, pages_per_block * case.page_size, 32), num_cores, 16 << 20)


def check(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    *,
    given: Operands | None = None,
    num_cores: int = 1,
    pages_per_block: int = 4,
) -> None:
    monkeypatch.setattr(fused, "this_chip", lambda: tiny_chip(case, num_cores, pages_per_block))
    given = given or operands(case)
    step = make_step(case, given)
    is_scaled = case.kv_dtype is not None
    new = [x.astype(np.float32) * (SCALE if is_scaled else 1) for x in (step.k, step.v)]
    scale = jnp.full(case.num_kv_heads, SCALE, jnp.float32)
    attend = functools.partial(
        write_and_attend,
        scoring=replace(case.scoring, scale=case.scoring.scale / (SCALE if is_scaled else 1)),
        sinks=None if given.sinks is None else jnp.asarray(given.sinks),
        scales=KVScales(scale, scale) if is_scaled else None,
        backend="mosaic_tpu",
    )
    arrays = map(jnp.asarray, (given.q, *new, step.k_pages, step.v_pages, np.int32(LAYER)))
    with tpu_interpreter(num_cores):
        out, *pools = jax.block_until_ready(jax.jit(attend, compiler_options=QUICKLY)(*arrays, step.paging))
    found = np.asarray(out, np.float64)
    assert np.isfinite(found).all()
    wanted = expected(case, given) * (SCALE if is_scaled else 1)
    np.testing.assert_allclose(found[: len(wanted)], wanted, atol=TOLERANCES[case.dtype], rtol=0)
    for pool, wanted_pool in zip(pools, (given.k_pages, given.v_pages), strict=True):
        written = np.asarray(pool, np.float32)[:, 1:]  # 0 is the null page
        np.testing.assert_array_equal(written, in_pool_heads(wanted_pool)[:, 1:].astype(np.float32))


@pytest.mark.parametrize(
    "case",
    [*FAST, *(pytest.param(case, marks=[] if case in IN_CI else pytest.mark.exhaustive) for case in SLOW)],
    ids=str,
)
def test_a_step_equals_dense_softmax_and_writes_its_tokens(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case, monkeypatch)


@pytest.mark.parametrize("case", FAST, ids=str)
def test_two_cores_share_the_heads(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    check(replace(case, num_heads=2 * case.num_heads, num_kv_heads=4), monkeypatch, num_cores=2)


def test_heads_of_a_large_block_are_computed_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_UNROLLED_SCORES", 0)
    check(replace(FAST[0], num_heads=8, num_kv_heads=4, dim=128), monkeypatch)


def test_a_page_table_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Case((1, 1, 1), (2300, 30, 2049), num_heads=1, num_kv_heads=1), monkeypatch, pages_per_block=32)


def test_a_row_of_131072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = long_row(1, 131072, page_size=512)
    check(case, monkeypatch, given=given, pages_per_block=8)


def test_a_chunk_of_a_row_of_131072_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    case, given = long_row(9, 131072, page_size=512)
    check(case, monkeypatch, given=given, pages_per_block=8)


def test_blocks_shrink_until_they_fit_into_vmem() -> None:
    shape = Shape(64, 32, 256, 128, 1024, kv_bytes=4, query_bytes=4)
    chip = Chip(BlockSizes(1 << 30, 1 << 20, 512), 1, 64 << 20)
    wanted = Plan(512, 2, 128, 1)
    assert wanted.vmem_bytes(shape) > chip.vmem_bytes
    for found in (decode_plan(shape, chip), chunk_plan(shape, chip, 4096)):
        assert found.vmem_bytes(shape) <= found.vmem_limit_bytes(shape, chip) <= chip.vmem_bytes
        assert IDS_PER_LINE % found.pages_per_block == 0


def test_heads_are_written_in_parts_that_fit_into_vmem() -> None:
    chip = Chip(BlockSizes(1 << 20, 1 << 10, 128), 1, 128 << 20)
    splits = [
        write_plan(Shape(32, heads, 128, page_size, 16, kv_bytes, query_bytes=2), chip).head_splits
        for heads, page_size, kv_bytes in ((8, 64, 2), (32, 128, 2), (32, 1024, 2), (32, 1024, 1), (40, 1024, 4))
    ]
    assert splits == [1, 1, 4, 4, 8]
    shape = Shape(32, 32, 128, 128, 16, 2, 2)
    plan = write_plan(shape, chip)
    assert 16 << 20 < plan.vmem_bytes(shape) < plan.vmem_limit_bytes(shape, chip) <= chip.vmem_bytes


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_slots_copied_at_once_divide_every_page(name: str) -> None:
    dtype, bfloat16 = jnp.dtype(name), jnp.dtype("bfloat16")
    sizes = [size for size in range(1, 1025) if unsupported((1, 1, 8, size, 128), bfloat16, dtype) is None]
    assert {16, 48, 64, 80, 1024} <= set(sizes)
    assert [size for size in sizes if size % slots_per_tile(dtype, size)] == []
