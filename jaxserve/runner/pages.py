"""Copies pages of the KV pool, and slots of recurrent states, between the devices and the host: the device as the tiers see it.

A program copies a fixed number of pages of every data rank, so a few programs serve every request. Unused places of a batch are the
null page, and those of a batch of slots the slot of zeros, to which zeros are written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kv.tiers.page import CacheBlock, Page, PageLayout
from jaxserve.layers.cache import ArrayShape, CacheShapes, GroupShapes, assemble
from jaxserve.runner.state import CopiedContent, DeviceState
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
    """Return the layout of pages of a model whose groups with pages share one page table, and that of snapshots of its states.

    A page has every array of one group, then of the next. model: a digest of all that decides their content.
    """
    groups = list(enumerate(cache))
    states = [(index, group) for index, group in groups if group.kind == "state"]
    snapshot = _layout(model, states, "(layers, state)") if states else None
    pages = [(index, group) for index, group in groups if group.kind != "state"]
    return replace(_layout(model, pages, "(layers, heads, tokens, head size)"), snapshot=snapshot)


def _layout(model: str, groups: Sequence[tuple[int, GroupShapes]], dimensions: str) -> PageLayout:
    """Return the layout of pages or slots with the arrays of these groups, each with its number."""
    blocks, descriptions = list[CacheBlock](), list[str]()
    for index, group in groups:
        fields = type(assemble(group.kind, group.arrays))._fields
        names = map(str, range(len(group.arrays))) if group.kind == "state" else fields
        for name, array in zip(names, group.arrays, strict=True):
            num_bytes = math.prod(_page_shape(array)) * jnp.dtype(array.dtype).itemsize
            blocks.append(CacheBlock(f"{group.kind} {index}", name, num_bytes))
            descriptions.append(f"{array.dtype} {'x'.join(map(str, _page_shape(array)))}")
    return PageLayout(model, f"{', '.join(descriptions)} {dimensions}", tuple(blocks))


def _page_shape(array: ArrayShape) -> tuple[int, ...]:
    """Return the shape of one page of an array, `[L, K, S, H]`, or of one slot."""
    return (array.shape[0], *array.shape[2:])


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Batches of pages on their way to the host."""

    batches: list[tuple[list[int], tuple[jax.Array, ...]]]
    """Places of the pages that are wanted, and the arrays."""

    def pages(self) -> list[Page]:
        """Wait for the pages. Raises the error of the device."""
        found: list[Page] = []
        for places, arrays in self.batches:
            batches = [np.asarray(array).reshape(len(array), -1).view(np.uint8) for array in arrays]
            found += [tuple(batch[place] for batch in batches) for place in places]
        return found


@dataclass(frozen=True, slots=True)
class Staged:
    """Batches of pages on their way to the device."""

    rank: int
    """Data rank whose blocks they are for."""
    batches: list[tuple[int, tuple[jax.Array, ...]]]

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.batches)

    def is_ready(self) -> bool:
        return all(array.is_ready() for _, arrays in self.batches for array in arrays)  # type: ignore[attr-defined]


class DevicePages:
    """The pages, or the slots of states, of the cache. Reads and writes run in the order of their calls, among the steps of the
    runner."""

    def __init__(self, layout: PageLayout, state: DeviceState, content: CopiedContent = "pages") -> None:
        self.layout = layout
        self._state = state
        self._content = content
        self._sizes = state.shapes.batches(content)
        self._arrays = state.shapes.copied(content)
        self._num_ranks = state.num_ranks(content)
        self._rank_size = self._arrays[0].shape[1] // self._num_ranks

    @property
    def max_batch(self) -> int:
        return max(self._sizes)

    def read(self, blocks: Sequence[BlockId]) -> PendingRead:
        """Dispatch the copies of `blocks`."""
        batches = []
        for start in range(0, len(blocks), self.max_batch):
            padded, places = self._padded(blocks[start : start + self.max_batch])
            arrays = self._state.read(self._content, padded)
            for array in arrays:
                array.copy_to_host_async()
            batches.append((places, arrays))
        return PendingRead(batches)

    def stage(self, pages: Sequence[Page], rank: int = 0) -> Staged:
        """Start the transfer of `pages` to a data rank; their memory is copied first."""
        batches = []
        for start in range(0, len(pages), self.max_batch):
            some = pages[start : start + self.max_batch]
            size = self._size(len(some))
            arrays = []
            for index, (block, array) in enumerate(zip(self.layout.blocks, self._arrays, strict=True)):
                batch = np.zeros((self._num_ranks * size, block.num_bytes), np.uint8)
                for place, page in enumerate(some, rank * size):
                    batch[place] = page[index]
                arrays.append(batch.view(jnp.dtype(array.dtype)).reshape(len(batch), *_page_shape(array)))
            batches.append((len(some), self._state.stage(self._content, arrays)))
        return Staged(rank, batches)

    def write(self, blocks: Sequence[BlockId], staged: Staged) -> None:
        """Dispatch the write of `staged` into `blocks`, all of the rank that it was staged for. If it raises, the pool is lost and the
        state is new."""
        assert all(block // self._rank_size == staged.rank for block in blocks), "staged for another rank"
        start = 0
        for count, arrays in staged.batches:
            self._state.write(self._content, self._padded(blocks[start : start + count])[0], arrays)
            start += count

    def run_once(self) -> None:
        """Run every program on the null page: the first run of a program is slower than later ones."""
        for size in self._sizes:
            null = [NULL_BLOCK] * size
            self.write(null, self.stage(self.read(null).pages()))

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def _padded(self, blocks: Sequence[BlockId]) -> tuple[np.ndarray, list[int]]:
        """Return a batch of equally many blocks of each rank, counted within it, and the places of these blocks."""
        of_rank: list[list[int]] = [[] for _ in range(self._num_ranks)]
        where = []
        for block in blocks:
            rank, own = divmod(block, self._rank_size)
            where.append((rank, len(of_rank[rank])))
            of_rank[rank].append(own)
        size = self._size(max(map(len, of_rank)))
        padded = np.full((self._num_ranks, size), NULL_BLOCK, np.int32)
        for rank, own_blocks in enumerate(of_rank):
            padded[rank, : len(own_blocks)] = own_blocks
        return padded.reshape(-1), [rank * size + place for rank, place in where]


def open_pages(layout: PageLayout, state: DeviceState) -> tuple[DevicePages, DevicePages | None]:
    """Return what copies pages, and what copies slots of states if there are some. Runs every program once."""
    pages = DevicePages(layout, state)
    snapshots = None if layout.snapshot is None else DevicePages(layout.snapshot, state, "states")
    for each in (pages, snapshots):
        if each is not None:
            each.run_once()
    return pages, snapshots
