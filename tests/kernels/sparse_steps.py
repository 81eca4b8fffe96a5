"""A layer of sparse attention at the sizes of DeepSeek-V3.2 on eight devices, for contexts of 131,072 tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout
from jaxserve_kernels.sparse_attention import IndexQueries, write_and_attend, write_and_choose
from jaxtyping import Array

PAGES_OF_ROW, PAGE_SIZE, NUM_CHOSEN = 2048, 64, 2048
HEADS, INDEX_HEADS, KEY_WIDTH, WIDTH, VALUE_WIDTH = 16, 64, 128, 576, 512
POOL = (2, 8193, 1, PAGE_SIZE)
"""Two layers, and pages."""
DONATED = (3, 6)
"""Places of the pools among the operands."""


def sparse_step(num_tokens: int, num_rows: int, backend: Backend) -> Callable[..., tuple[Array, ...]]:
    """Return a function of the operands of `operands`: a decode step if each row has a token, else a mixed one."""

    def step(*given: Array) -> tuple[Array, ...]:
        queries, weights, keys, key_pages, q, latents, pages, tables, lengths, starts, *places = given
        ragged = None if num_tokens == num_rows else ragged_layout(starts, jnp.int32(0), num_tokens=num_tokens)
        paging, layer = Paging(tables, lengths, starts, *places, ragged), jnp.int32(1)
        index, options = IndexQueries(queries, weights), {"num_chosen": NUM_CHOSEN, "backend": backend}
        chosen, key_pages = write_and_choose(index, keys, key_pages, layer, paging, **options)  # type: ignore[arg-type]
        options |= {"value_width": VALUE_WIDTH, "scoring": Scoring(0.1)}
        out, pages = write_and_attend(q, latents, pages, layer, paging, chosen, **options)  # type: ignore[arg-type]
        return out, pages, key_pages

    return step


def operands(num_tokens: int, num_rows: int, dtype: str, sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of a step's operands."""
    floats = [(num_tokens, INDEX_HEADS, KEY_WIDTH), (num_tokens, INDEX_HEADS), (num_tokens, KEY_WIDTH)]
    floats += [(*POOL, KEY_WIDTH), (num_tokens, HEADS, WIDTH), (num_tokens, 1, WIDTH), (*POOL, WIDTH)]
    whole = [(num_rows, PAGES_OF_ROW), (num_rows,), (num_rows + 1,), (num_tokens,), (num_tokens,)]
    types = [jnp.dtype("float32" if place == 1 else dtype) for place in range(len(floats))]
    shapes = [*zip(floats, types, strict=True), *((shape, jnp.dtype("int32")) for shape in whole)]
    return [jax.ShapeDtypeStruct(shape, each, sharding=sharding) for shape, each in shapes]
