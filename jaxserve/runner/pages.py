"""Copies pages between the KV pool and the host: the programs, and the device as the tiers see it.

A program copies a fixed number of pages, so a few programs serve every request. Unused places of a batch are the null page.
The pages are copied one after the other by a loop: a gather or scatter along the page axis, which is not the first one,
would make XLA transpose the whole pool.

Letters: L layers, P pages, K KV heads, S tokens of a page, H head size, B pages of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.kv.spec import KVSpec
from jaxserve.kv.tiers.page import CacheBlock, Page, PageLayout
from jaxserve.layers.attention import KVPool
from jaxserve.runner.state import DeviceState
from jaxserve.types import NULL_BLOCK, BlockId

_GROUP: Final = "attention"
_MAX_BATCH_BYTES: Final = 16 << 20
_MAX_BATCH: Final = 64


def page_batches(spec: KVSpec) -> tuple[int, ...]:
    """Return the numbers of pages that programs copy, smallest first: at most 64, and 16 MiB if that is over a page."""
    largest = max(1, min(_MAX_BATCH, _MAX_BATCH_BYTES // spec.bytes_per_block))
    return tuple(sorted({max(1, largest // 8), largest}))


def page_layout(model: str, spec: KVSpec, dtype: jnp.dtype) -> PageLayout:
    """Return the layout of pages of a model with one kind of attention: its keys, then its values.

    model: a digest of all that decides their content.
    """
    half = spec.bytes_per_block // 2
    shape = f"{spec.num_layers}x{spec.num_kv_heads}x{spec.block_size}x{spec.head_dim}"
    blocks = tuple(CacheBlock(_GROUP, name, half) for name in KVPool._fields)
    return PageLayout(model, f"{dtype} {shape} (layers, heads, tokens, head size)", blocks)


def read_pages(pool: KVPool, blocks: Int[Array, "B"]) -> tuple[Float[Array, "B L K S H"], Float[Array, "B L K S H"]]:
    """Return copies of pages."""

    def copy(place: int | Array, copies: tuple[Array, Array]) -> tuple[Array, Array]:
        def one(half: Array, batch: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(half, blocks[place], 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(batch, jnp.moveaxis(page, 1, 0), place, axis=0)

        return one(pool.k, copies[0]), one(pool.v, copies[1])

    num_layers, _, *rest = pool.k.shape
    empty = jnp.zeros((len(blocks), num_layers, *rest), pool.k.dtype)
    k, v = jax.lax.fori_loop(0, len(blocks), copy, (empty, empty))
    return k, v


def write_pages(
    pool: KVPool, blocks: Int[Array, "B"], k: Float[Array, "B L K S H"], v: Float[Array, "B L K S H"]
) -> KVPool:
    """Overwrite pages. DONATES the pool."""

    def copy(place: int | Array, pool: KVPool) -> KVPool:
        def one(half: Array, batch: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(batch, place, 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(half, jnp.moveaxis(page, 0, 1), blocks[place], axis=1)

        return KVPool(one(pool.k, k), one(pool.v, v))

    return KVPool(*jax.lax.fori_loop(0, len(blocks), copy, pool))


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Batches of pages on their way to the host."""

    batches: list[tuple[int, tuple[jax.Array, ...]]]
    """Number of pages that are wanted, and the arrays."""

    def pages(self) -> list[Page]:
        """Wait for the pages. Raises the error of the device."""
        found: list[Page] = []
        for count, arrays in self.batches:
            halves = [np.asarray(array).reshape(len(array), -1).view(np.uint8) for array in arrays]
            found += [tuple(half[place] for half in halves) for place in range(count)]
        return found


@dataclass(frozen=True, slots=True)
class Staged:
    """Batches of pages on their way to the device."""

    count: int
    batches: list[tuple[int, tuple[jax.Array, ...]]]

    def is_ready(self) -> bool:
        return all(array.is_ready() for _, arrays in self.batches for array in arrays)  # type: ignore[attr-defined]


class DevicePages:
    """The pages of one pool. Reads and writes run in the order of their calls, among the steps of the runner."""

    def __init__(self, layout: PageLayout, spec: KVSpec, state: DeviceState) -> None:
        self.layout = layout
        self._state = state
        self._sizes = state.page_batches
        self._shape = (spec.num_layers, spec.num_kv_heads, spec.block_size, spec.head_dim)

    @property
    def max_batch(self) -> int:
        return max(self._sizes)

    def read(self, blocks: Sequence[BlockId]) -> PendingRead:
        """Dispatch the copies of `blocks`."""
        batches = []
        for start in range(0, len(blocks), self.max_batch):
            some = blocks[start : start + self.max_batch]
            arrays = self._state.read_pages(self._padded(some))
            for array in arrays:
                array.copy_to_host_async()
            batches.append((len(some), arrays))
        return PendingRead(batches)

    def stage(self, pages: Sequence[Page]) -> Staged:
        """Start the transfer of `pages`, whose memory is copied first."""
        batches = []
        for start in range(0, len(pages), self.max_batch):
            some = pages[start : start + self.max_batch]
            arrays = []
            for index, block in enumerate(self.layout.blocks):
                batch = np.zeros((self._size(len(some)), block.num_bytes), np.uint8)
                for place, page in enumerate(some):
                    batch[place] = page[index]
                arrays.append(self._state.stage(batch.view(self._state.kv_dtype).reshape(len(batch), *self._shape)))
            batches.append((len(some), tuple(arrays)))
        return Staged(len(pages), batches)

    def write(self, blocks: Sequence[BlockId], staged: Staged) -> None:
        """Dispatch the write of `staged` into `blocks`. If it raises, the pool is lost and the state is new."""
        start = 0
        for count, arrays in staged.batches:
            self._state.write_pages(self._padded(blocks[start : start + count]), arrays)
            start += count

    def run_once(self) -> None:
        """Run every program on the null page: the first run of a program is slower than later ones."""
        for size in self._sizes:
            null = [NULL_BLOCK] * size
            self.write(null, self.stage(self.read(null).pages()))

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _padded(self, blocks: Sequence[BlockId]) -> np.ndarray:
        padded = np.full(self._size(len(blocks)), NULL_BLOCK, np.int32)
        padded[: len(blocks)] = blocks
        return padded
