"""The programs that copy pages: they move what they are asked for, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kv.spec import KVSpec
from jaxserve.layers.cache import KVPool, pool_shapes, read_pages, write_pages
from jaxserve.runner.pages import page_batches, page_layout
from jaxserve.runner.state import StateProgram, StateShapes, state_programs
from jaxserve.runner.steps import lower_state
from jaxserve.sharding.mesh import Sharding
from jaxserve.sharding.rules import AxisRules

SHAPE = (3, 40, 2, 4, 8)
"""Layers, pages, heads, tokens, head size."""


def test_read_and_write_copy_the_pages_they_name() -> None:
    rng = np.random.default_rng(0)
    pool = KVPool(*(jnp.asarray(rng.random(SHAPE), jnp.float32) for _ in range(2)))
    blocks = jnp.array([7, 3, 0, 0])
    k, v = read_pages(pool, blocks)
    assert np.array_equal(k, np.moveaxis(np.asarray(pool.k)[:, [7, 3, 0, 0]], 1, 0))
    written = write_pages(pool, jnp.array([9, 11, 0, 0]), k, v)
    for before, after in zip(pool, written, strict=True):
        expected = np.array(before)
        expected[:, [9, 11]] = expected[:, [7, 3]]
        assert np.array_equal(after, expected)


@pytest.mark.parametrize("kind", ["read_pages", "write_pages"])
def test_program_needs_no_second_pool(kind: str, one_device: Sharding) -> None:
    shapes = StateShapes(pool_shapes(SHAPE, "float32"), 0, 10, page_batches=(4,))
    program = next(program for program in state_programs(shapes) if program.kind == kind)
    memory = lower_state(one_device, program).compile().memory_analysis()
    assert memory is not None
    half = 4 * np.prod(SHAPE)
    assert memory.temp_size_in_bytes < half / 4
    assert memory.alias_size_in_bytes == (2 * half if kind == "write_pages" else 0)


@pytest.fixture
def one_device() -> Sharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    return Sharding(mesh, AxisRules())


def test_engine_without_tiers_has_no_page_programs() -> None:
    shapes = StateShapes(pool_shapes(SHAPE, "float32"), 4, 10)
    assert [program.name for program in state_programs(shapes)] == [
        "state/cache",
        "state/slots",
        "state/init_slot",
        "state/masks",
    ]
    assert StateProgram("read_pages", shapes, 8).name == "state/read_pages/8"


def test_batches_are_bounded_in_pages_and_bytes() -> None:
    small = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, dtype_bytes=4, block_size=16)
    large = KVSpec(num_layers=80, num_kv_heads=8, head_dim=128, dtype_bytes=2, block_size=16)
    assert page_batches(small) == (8, 64)
    assert page_batches(large) == (1, 3)  # pages of 5 MiB
    assert max(page_batches(large)) * large.bytes_per_block <= 16 << 20


def test_layout_differs_by_model_dtype_and_shape() -> None:
    spec = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, dtype_bytes=2, block_size=16)
    wide = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype_bytes=2, block_size=16)
    layouts = [
        page_layout("a", spec, jnp.dtype("bfloat16")),
        page_layout("b", spec, jnp.dtype("bfloat16")),
        page_layout("a", spec, jnp.dtype("float16")),
        page_layout("a", wide, jnp.dtype("bfloat16")),
    ]
    assert len({layout.identity for layout in layouts}) == 4
    assert all(layout.num_bytes == spec.bytes_per_block for layout in layouts)
