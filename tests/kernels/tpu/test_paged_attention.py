"""The TPU kernels, interpreted on the CPU with its race detector, against a softmax in float64.

Memory that nobody has written holds NaN, in the pool and in the kernels' own buffers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxserve_kernels.paged_attention.tpu import pool_head_dim, supports, write_and_attend
from jaxserve_kernels.paged_attention.tpu.plan import BlockSizes, Chip, Plan, Shape, chunk_plan, decode_plan
from jaxserve_kernels.paged_attention.tpu.stream import IDS_PER_LINE

from tests.kernels.tpu.step import LAYER, Step, expected, make_arrays

# Rows of nothing, of one token, with a full last page, one token into a page, of several blocks of two pages.
DECODE = Step(((1, 1), (0, 0), (1, 16), (1, 17), (1, 100), (0, 0), (1, 64)))
# Decode rows, a fresh prompt, chunks behind a cached prefix (borders in the middle of pages, tiles and blocks), one
# chunk of a single token, one that fills its last page, a row of nothing; then padding.
MIXED = Step(((1, 17), (1, 1), (5, 5), (20, 37), (1, 33), (38, 64), (0, 0)), num_tokens=80)

CASES = {
    "decode": DECODE,
    "decode window on a page border": replace(DECODE, sliding_window=16),
    "decode window across a page border, softcap": replace(DECODE, sliding_window=21, softcap=2.0),
    "decode window of one": replace(DECODE, sliding_window=1),
    "decode float32": replace(DECODE, dtype="float32", head_dim=96),
    "decode int8": replace(DECODE, dtype="int8"),
    "decode fp8": replace(DECODE, dtype="float8_e4m3fn", page_size=32, max_pages=4),
    "decode one kv head, group of 10": replace(DECODE, kv_heads=1, group=10, head_dim=80),
    "decode group of one, wide heads": replace(DECODE, group=1, head_dim=256, pool_dim=256),
    "decode nothing": Step(((0, 0), (0, 0))),
    "mixed": MIXED,
    "mixed window, softcap": replace(MIXED, sliding_window=7, softcap=2.0),
    "mixed window on a page border": replace(MIXED, sliding_window=16),
    "mixed float32": replace(MIXED, dtype="float32", head_dim=64, group=3),
    "mixed fp8": replace(MIXED, dtype="float8_e4m3fn"),
    "mixed int8, page of 32": replace(MIXED, dtype="int8", page_size=32, max_pages=4, kv_heads=1, group=1),
    "mixed decode rows only": Step(((1, 17), (1, 40)), num_tokens=16),
    "mixed one chunk, tiles smaller than pages": Step(((50, 60),), num_tokens=50, page_size=32, max_pages=2),
    "mixed nothing": Step(((0, 0),), num_tokens=16),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float8_e4m3fn": 2e-2, "int8": 0.6}


def tiny_chip(step: Step, num_cores: int, pages_per_block: int) -> Chip:
    """Few pages a block and sixteen tokens a tile, so that a few keys make many."""
    page = step.kv_heads // num_cores * step.page_size * step.pool_dim * jnp.dtype(step.dtype).itemsize
    sizes = BlockSizes(pages_per_block * page, pages_per_block * step.page_size, 16)
    return Chip(sizes, num_cores, 16 << 20)


@contextlib.contextmanager
def interpreted(num_cores: int) -> Iterator[None]:
    """Kernels run in the interpreter, and no two accesses to memory race; jax before 0.12 only prints those."""
    printed = io.StringIO()
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=num_cores)
    try:
        with pltpu.force_tpu_interpret_mode(params), contextlib.redirect_stdout(printed):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    assert "RACE" not in printed.getvalue()


def check(step: Step, *, num_cores: int = 1, pages_per_block: int = 2) -> None:
    arrays = make_arrays(step)
    operands = (arrays.q, arrays.k, arrays.v, *arrays.pools, np.int32(LAYER))
    attend = functools.partial(
        write_and_attend,
        sliding_window=step.sliding_window,
        softcap=step.softcap,
        chip=tiny_chip(step, num_cores, pages_per_block),
    )
    with interpreted(num_cores):
        out, log_sum, *pools = jax.block_until_ready(jax.jit(attend)(*map(jnp.asarray, operands), arrays.paging(step)))
    wanted, wanted_sum = expected(step, arrays)
    np.testing.assert_allclose(out.astype(np.float32), wanted, atol=TOLERANCE[step.dtype])
    is_seen = np.isfinite(wanted_sum)
    np.testing.assert_allclose(log_sum[is_seen], wanted_sum[is_seen], atol=2e-2)
    assert (log_sum[~is_seen] < -1e29).all() and np.isfinite(log_sum).all()
    for pool, written in zip(pools, arrays.written, strict=True):
        np.testing.assert_array_equal(*(x[:, 1:].astype(np.float32) for x in (pool, written)))  # 0 is the null page


FAST = ("decode", "mixed")


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, step in CASES.items()],
)
def test_a_step_writes_its_keys_and_attends(step: Step) -> None:
    check(step)


@pytest.mark.slow
@pytest.mark.parametrize("step", [DECODE, replace(MIXED, sliding_window=7)], ids=["decode", "mixed"])
def test_two_cores_share_the_heads(step: Step) -> None:
    check(step, num_cores=2)


@pytest.mark.slow
def test_a_page_table_of_several_lines() -> None:
    check(Step(((1, 2300), (1, 30), (1, 2049)), kv_heads=1, group=1, max_pages=150), pages_per_block=32)


def test_blocks_shrink_until_they_fit_into_vmem() -> None:
    shape = Shape(64, 32, 256, 128, 1024, kv_bytes=4, query_bytes=4)
    chip = Chip(BlockSizes(1 << 30, 1 << 20, 512), 1, 64 << 20)
    wanted = Plan(512, 2, 128, 1)
    assert wanted.vmem_bytes(shape) > chip.vmem_bytes
    for plan in (decode_plan(shape, chip), chunk_plan(shape, chip, 4096)):
        assert plan.vmem_bytes(shape) <= plan.vmem_limit_bytes(shape, chip) <= chip.vmem_bytes
        assert IDS_PER_LINE % plan.pages_per_block == 0


@pytest.mark.parametrize(
    ("query", "pool", "shape", "reason"),
    [
        ("bfloat16", "float16", (1, 2, 1, 16, 128), "KV cache of float16"),
        ("float16", "bfloat16", (1, 2, 1, 16, 128), "nothing in float16"),
        ("bfloat16", "bfloat16", (1, 2, 1, 16, 64), r"head dim \(64\)"),
        ("bfloat16", "bfloat16", (1, 2, 1, 8, 128), r"page size \(8\)"),
    ],
)
def test_what_is_not_served_is_said(query: str, pool: str, shape: tuple[int, ...], reason: str) -> None:
    assert re.search(reason, supports(jnp.dtype(query), jnp.dtype(pool), shape) or "")


@pytest.mark.parametrize("pool", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_is_served_from_a_padded_pool(pool: str, head_dim: int) -> None:
    assert supports(jnp.dtype("bfloat16"), jnp.dtype(pool), (1, 2, 1, 16, pool_head_dim(head_dim))) is None
