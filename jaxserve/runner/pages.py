"""Copies pages between the KV pool and the host: the device as the tiers see it.

A program copies a fixed number of pages, so a few programs serve every request. Unused places of a batch are the null page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kv.tiers.page import CacheBlock, Page, PageLayout
from jaxserve.layers.cache import ArrayShape, CacheShapes, assemble
from jaxserve.runner.state import DeviceState
from jaxserve.types import NULL_BLOCK, BlockId

_MAX_BATCH_BYTES: Final = 16 << 20
_MAX_BATCH: Final = 64


def page_batches(page_bytes: int) -> tuple[int, ...]:
    """Return the numbers of pages that programs copy, smallest first: at most 64, and 16 MiB if that is over a page.

    page_bytes: one page over all groups.
    """
    largest = max(1, min(_MAX_BATCH, _MAX_BATCH_BYTES // page_bytes))
    return tuple(sorted({max(1, largest // 8), largest}))


def page_layout(model: str, cache: CacheShapes) -> PageLayout:
    """Return the layout of pages of a model whose groups share one page table: every array of one group, then of the next.

    model: a digest of all that decides their content.
    """
    blocks, descriptions = list[CacheBlock](), list[str]()
    for index, group in enumerate(cache):
        names = type(assemble(group.kind, group.arrays))._fields
        for name, array in zip(names, group.arrays, strict=True):
            num_bytes = math.prod(_page_shape(array)) * jnp.dtype(array.dtype).itemsize
            blocks.append(CacheBlock(f"{group.kind} {index}", name, num_bytes))
            descriptions.append(f"{array.dtype} {'x'.join(map(str, _page_shape(array)))}")
    return PageLayout(model, f"{', '.join(descriptions)} (layers, heads, tokens, head size)", tuple(blocks))


def _page_shape(array: ArrayShape) -> tuple[int, ...]:
    """Return the shape of one page of an array: `[L, K, S, H]`."""
    return (array.shape[0], *array.shape[2:])


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Batches of pages on their way to the host."""

    batches: list[tuple[int, tuple[jax.Array, ...]]]
    """Number of pages that are wanted, and the arrays."""

    def pages(self) -> list[Page]:
        """Wait for the pages. Raises the error of the device."""
        found: list[Page] = []
        for count, arrays in self.batches:
            batches = [np.asarray(array).reshape(len(array), -1).view(np.uint8) for array in arrays]
            found += [tuple(batch[place] for batch in batches) for place in range(count)]
        return found


@dataclass(frozen=True, slots=True)
class Staged:
    """Batches of pages on their way to the device."""

    count: int
    batches: list[tuple[int, tuple[jax.Array, ...]]]

    def is_ready(self) -> bool:
        return all(array.is_ready() for _, arrays in self.batches for array in arrays)  # type: ignore[attr-defined]


class DevicePages:
    """The pages of the cache. Reads and writes run in the order of their calls, among the steps of the runner."""

    def __init__(self, layout: PageLayout, state: DeviceState) -> None:
        self.layout = layout
        self._state = state
        self._sizes = state.page_batches

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
            for index, (block, array) in enumerate(zip(self.layout.blocks, self._state.page_arrays, strict=True)):
                batch = np.zeros((self._size(len(some)), block.num_bytes), np.uint8)
                for place, page in enumerate(some):
                    batch[place] = page[index]
                arrays.append(batch.view(jnp.dtype(array.dtype)).reshape(len(batch), *_page_shape(array)))
            batches.append((len(some), self._state.stage(arrays)))
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
