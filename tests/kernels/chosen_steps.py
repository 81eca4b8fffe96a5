"""Layers of attention to chosen blocks at published sizes on eight devices, for contexts of 131,072 tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.block_sparse_attention import BlockChoice, BlockKeys, IndexOperands
from jaxserve_kernels.block_sparse_attention import write_and_attend as attend_to_blocks
from jaxserve_kernels.compressed_attention import (
    Compressed,
    Mixture,
    closing_tokens,
    compress,
    write,
    write_and_attend,
    write_blocks,
)
from jaxserve_kernels.compressed_attention.api import block_slots
from jaxserve_kernels.paged_attention import Paging, Scoring, ragged_layout
from jaxserve_kernels.rope import Rotation
from jaxserve_kernels.sparse_attention import IndexQueries, choose_blocks
from jaxtyping import Array

LONGEST = 131_072
"""Tokens of a row at most."""
POOL_TOKENS = 1 << 19


@dataclass(frozen=True)
class ChosenStep:
    """A decode step if there is a token for each row, else a mixed one."""

    num_tokens: int
    num_rows: int
    page_size: int
    backend: Backend

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Return the shapes of page tables, lengths, borders of rows, and of the tokens' pages and slots."""
        pages = LONGEST // self.page_size
        return [(self.num_rows, pages), (self.num_rows,), (self.num_rows + 1,), (self.num_tokens,), (self.num_tokens,)]

    def pool(self, slots: int, width: int, heads: int = 1) -> tuple[int, ...]:
        """Return the shape of a pool of two layers."""
        return 2, POOL_TOKENS // self.page_size + 1, heads, slots, width

    def paging(self, places: tuple[Array, ...]) -> Paging:
        tables, lengths, starts, pages, slots = places
        is_decode = self.num_tokens == self.num_rows
        ragged = None if is_decode else ragged_layout(starts, jnp.int32(0), num_tokens=self.num_tokens)
        return Paging(tables, lengths, starts, pages, slots, ragged)

    def lower(
        self, step: Callable[..., Any], floats: list[tuple[int, ...]], donated: tuple[int, ...], sharding: Any
    ) -> Any:
        """Lower a step of bfloat16 arrays and these places. donated: the pools among the arrays."""
        shapes = [(shape, "bfloat16") for shape in floats] + [(shape, "int32") for shape in self.places]
        operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in shapes]
        return jax.jit(step, donate_argnums=donated).lower(*operands)


def lower_blocks(given: ChosenStep, sharding: Any) -> Any:
    """Lower a layer of MiniMax-M3: 16 blocks of 128 tokens for one KV head of 8 query heads."""
    num_tokens, size = given.num_tokens, given.page_size

    def step(*operands: Array) -> tuple[Array, ...]:
        q, k, v, queries, keys, k_pages, v_pages, key_pages, *places = operands
        index = IndexOperands(queries, keys, key_pages, jnp.int32(1))
        options: dict[str, Any] = {"choice": BlockChoice(128, 16, 1), "scoring": Scoring(0.1), "backend": given.backend}
        return attend_to_blocks(q, k, v, k_pages, v_pages, jnp.int32(1), given.paging(tuple(places)), index, **options)

    floats = [(num_tokens, heads, 128) for heads in (8, 1, 1, 1)] + [(num_tokens, 128)] + [given.pool(size, 128)] * 3
    return given.lower(step, floats, (5, 6, 7), sharding)


def lower_pooled(given: ChosenStep, sharding: Any) -> Any:
    """Lower a layer of Qwen4-Exp: 512 blocks of 4 tokens that 4 heads of an indexer choose together, for one KV head of 3 query heads."""
    num_tokens, size, dim, width, num_turning = given.num_tokens, given.page_size, 256, 128, 32
    choice = BlockChoice(4, 512, 0, is_pooled=True)

    def step(*operands: Array) -> tuple[Array, ...]:
        q, k, v, queries, keys, k_pages, v_pages, key_pages, weight, *places = operands
        positions = 4.0 * jnp.arange(LONGEST // 4)[:, None]
        angles = positions * 1e7 ** -jnp.linspace(0, 1, num_turning, endpoint=False)
        made = BlockKeys(weight.astype(jnp.float32), jnp.float32(1e-6), Rotation(jnp.cos(angles), jnp.sin(angles)))
        index = IndexOperands(queries, keys, key_pages, jnp.int32(1), made)
        options: dict[str, Any] = {"choice": choice, "scoring": Scoring(0.1), "backend": given.backend}
        return attend_to_blocks(q, k, v, k_pages, v_pages, jnp.int32(1), given.paging(tuple(places)), index, **options)

    floats: list[tuple[int, ...]] = [(num_tokens, 3, dim), (num_tokens, 1, dim), (num_tokens, 1, dim)]
    floats += [(num_tokens, 4, width), (num_tokens, width), *[given.pool(size, dim)] * 2, given.pool(size, width)]
    return given.lower(step, [*floats, (width,)], (5, 6, 7), sharding)


def lower_compressed(given: ChosenStep, sharding: Any) -> Any:
    """Lower a layer of DeepSeek-V4: a window of 128 tokens and 512 blocks of 4 that 64 heads of an indexer choose, for 8 heads."""
    num_tokens, size, rate, dim, index_dim = given.num_tokens, given.page_size, 4, 512, 128

    def step(*operands: Array) -> tuple[Array, ...]:
        q, vectors, added, queries, weights, bias, index_bias, pages, added_pages, block_pages, key_pages, *places = (
            operands
        )
        paging, layer = given.paging(tuple(places)), jnp.int32(1)
        added_pages = write(added, added_pages, layer, paging)
        closing = closing_tokens(paging, num_tokens, rate)
        found = []
        for pool, biases, start, width in ((block_pages, bias, 0, dim), (key_pages, index_bias, 4 * dim, index_dim)):
            mixture = Mixture(rate, start, width, overlaps=True)
            made = compress(added_pages, layer, paging, closing, biases, mixture, backend=given.backend)
            found.append(write_blocks(made, pool, layer, paging, closing, rate))
        index = IndexQueries(queries, weights.astype(jnp.float32))
        chosen = choose_blocks(index, found[1], layer, paging, num_chosen=512, rate=rate, backend=given.backend)
        blocks = Compressed(found[0], layer, paging, chosen)
        options: dict[str, Any] = {"window": 128, "rate": rate, "scoring": Scoring(0.1), "backend": given.backend}
        out, pages = write_and_attend(q, vectors, pages, layer, paging, blocks, **options)
        return out, pages, added_pages, *found

    width, slots = 4 * (dim + index_dim), block_slots(size, rate)
    floats: list[tuple[int, ...]] = [
        (num_tokens, 8, dim),
        (num_tokens, dim),
        (num_tokens, width),
        (num_tokens, 64, index_dim),
    ]
    floats += [(num_tokens, 64), (rate, 2 * dim), (rate, 2 * index_dim)]
    floats += [given.pool(size, dim), given.pool(size, width), given.pool(slots, dim), given.pool(slots, index_dim)]
    return given.lower(step, floats, (7, 8, 9, 10), sharding)
