"""The programs that copy pages: they move what they are asked for, in place."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.cache import ArrayShape, CacheShapes, GroupShapes, pool_shapes, read_pages, write_pages
from jaxserve.runner.pages import page_batches, page_layout
from jaxserve.runner.state import StateProgram, StateShapes, state_programs
from jaxserve.runner.steps import lower_state
from jaxserve.sharding.mesh import Sharding
from jaxserve.sharding.rules import AxisRules

SHAPE = (3, 40, 2, 4, 8)
"""Layers, pages, heads, tokens, head size."""


LATENT_SHAPE = (5, 40, 1, 4, 24)
CACHES: dict[str, CacheShapes] = {
    "full": pool_shapes(SHAPE, "float32"),
    "latent": (GroupShapes("latent", (ArrayShape(LATENT_SHAPE, "float32", (None, "pages")),)),),
    "two shapes": (*pool_shapes(SHAPE, "float32"), *pool_shapes((2, 40, 1, 4, 16), "float32")),
}


def arrays_of(cache: CacheShapes) -> list[ArrayShape]:
    return [array for group in cache for array in group.arrays]


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
def test_read_and_write_copy_the_pages_they_name(cache: CacheShapes) -> None:
    rng = np.random.default_rng(0)
    pools = [jnp.asarray(rng.random(array.shape), array.dtype) for array in arrays_of(cache)]
    before = [np.array(pool) for pool in pools]
    batches = read_pages(pools, jnp.array([7, 3, 0, 0]))
    for pool, batch in zip(before, batches, strict=True):
        assert np.array_equal(batch, np.moveaxis(pool[:, [7, 3, 0, 0]], 1, 0))
    for pool, after in zip(before, write_pages(pools, jnp.array([9, 11, 0, 0]), *batches), strict=True):
        pool[:, [9, 11]] = pool[:, [7, 3]]
        assert np.array_equal(after, pool)


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES.keys())
@pytest.mark.parametrize("kind", ["read_pages", "write_pages"])
def test_program_needs_no_second_pool(kind: str, cache: CacheShapes, one_device: Sharding) -> None:
    shapes = StateShapes(cache, 0, 10, page_batches=(4,))
    program = next(program for program in state_programs(shapes) if program.kind == kind)
    memory = lower_state(one_device, program).compile().memory_analysis()
    assert memory is not None
    sizes = [np.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in arrays_of(cache)]
    assert memory.temp_size_in_bytes < sum(sizes) / 4
    assert memory.alias_size_in_bytes == (sum(sizes) if kind == "write_pages" else 0)


@pytest.mark.parametrize("content", ["pages", "states"])
def test_every_rank_copies_pages_or_slots_of_its_own(content: Literal["pages", "states"]) -> None:
    rules = AxisRules((("data", 2), ("tensor", 2)), (("pages", ("data",)), ("kv_heads", ("tensor",))))
    sharding = Sharding(jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor")), rules)
    state = ArrayShape((3, 12, 4, 5), "float32", (None, "pages"))
    shapes = StateShapes((*pool_shapes(SHAPE, "float32"), GroupShapes("state", (state,))), 0, 10, page_batches=(2,))
    programs = {program.kind: program for program in state_programs(shapes) if content in program.kind}
    read, write = (lower_state(sharding, programs[f"{kind}_{content}"]).compile() for kind in ("read", "write"))
    rng = np.random.default_rng(0)
    before = [rng.random(array.shape, np.float32) for array in shapes.copied(content)]
    count, size = shapes.batches(content)[0], before[0].shape[1] // 2
    places = [sharding.place(array.axes) for array in shapes.copied(content)]
    pools = tuple(map(jax.device_put, before, places))
    sources, targets = (np.array([*own, *own], np.int32) for own in ([3, 1][:count], [4, 5][:count]))
    sources[count:] += 1  # the second rank copies others
    batches = read(pools, sources)
    whole = np.repeat([0, size], count)
    for pool, batch in zip(before, batches, strict=True):
        assert np.array_equal(batch, np.moveaxis(pool[:, sources + whole], 1, 0))
    for pool, after in zip(before, write(pools, targets, *batches), strict=True):
        pool[:, targets + whole] = pool[:, sources + whole]
        assert np.array_equal(after, pool)
    assert read.memory_analysis().temp_size_in_bytes < sum(pool.nbytes for pool in before) / 4


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
    assert page_batches(4096) == (8, 64)
    assert page_batches(5 << 20) == (1, 3)
    assert page_batches(20 << 20) == (1,)


def test_layout_differs_by_model_dtype_kind_and_shape() -> None:
    shape = (2, 40, 1, 16, 16)
    caches = {
        "keys and values": pool_shapes(shape, "bfloat16"),
        "another dtype": pool_shapes(shape, "float16"),
        "more and smaller heads": pool_shapes((2, 40, 2, 16, 8), "bfloat16"),
        "latent": (GroupShapes("latent", (ArrayShape(shape, "bfloat16", (None, "pages")),)),),
        "two groups": pool_shapes((1, 40, 1, 16, 16), "bfloat16") * 2,
    }
    layouts = {name: page_layout("a", cache) for name, cache in caches.items()}
    layouts["another model"] = page_layout("b", caches["keys and values"])
    assert len({layout.identity for layout in layouts.values()}) == len(layouts)
    assert {name: layout.num_bytes for name, layout in layouts.items() if name != "latent"} == dict.fromkeys(
        [name for name in layouts if name != "latent"], 2 * 2 * 16 * 16 * 2
    )
    assert layouts["latent"].num_bytes == 2 * 16 * 16 * 2
    more_pages = page_layout("a", pool_shapes((2, 99, 1, 16, 16), "bfloat16"))
    assert more_pages == layouts["keys and values"], "the number of pages is no part of a page"
