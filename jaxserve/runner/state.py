"""State on the devices: the cache and the slots, and the programs that create and update them between steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE, Backend
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import ArrayShape, Cache, CacheShapes, assemble, read_pages, write_pages
from jaxserve.runner.host.cores import num_cores
from jaxserve.runner.images.encoder import Activations, ImageShape
from jaxserve.runner.page_tables import SentTables
from jaxserve.runner.slots import MASKS_AT_ONCE, mask_rows, slot_row
from jaxserve.sampling.params import SlotInit
from jaxserve.scheduler.plan import Mask, StepPlan
from jaxserve.sharding.mesh import Sharding

_IDLE_S: Final = 0.5
"""After a step was dispatched, the next one may come within this time."""


class StateArrays(NamedTuple):
    """Arrays that every step takes (DONATED) and returns in the same buffers."""

    cache: Cache | None
    """None for an encoder."""
    slots: Int[Array, "X1 S"] | None
    """None where a step samples nothing."""
    tables: Int[Array, "X1 M"] | None = None
    """Page tables by slot; None where they come with every plan."""
    images: Float[Array, "Z1 W"] | None = None
    """Embeddings of images and of prompts, which tokens name by row; None for a model that reads tokens only."""
    drafts: Int[Array, "X1 W"] | None = None
    """Position of the newest token and the drafted ones after it, by slot; None without a draft model."""
    activations: Activations | None = None
    """Activations of the images that are being encoded, between two parts of an encoder call; None unless calls have parts."""


@dataclass(frozen=True, slots=True)
class StateShapes:
    """Shapes of the state of one engine."""

    cache: CacheShapes | None
    """None for an encoder."""
    num_slots: int
    """0 where a step samples nothing."""
    vocab_size: int
    max_pages: int = 0
    """Pages of one of a row's page tables on the device; 0 where they come with every plan."""
    backend: Backend = "reference"
    """Native backends have the system provide the cache's memory from `DeviceState.provide_memory` on."""
    page_batches: tuple[int, ...] = ()
    """Numbers of pages of a data rank that one program copies between pool and host; none without tiers."""
    images: ImageShape | None = None
    image_dtype: jnp.dtype = jnp.dtype("float32")
    num_drafts: int = 0
    """Tokens that a draft model drafts for a slot; 0 without one."""

    @property
    def num_tables(self) -> int:
        """Page tables of a request."""
        return 1 + max((group.table for group in self.cache or ()), default=0)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        """Shape of the first group's arrays: `[L, P, K, S, H]`; empty for an encoder."""
        return self.cache[0].arrays[0].shape if self.cache else ()

    @property
    def arrays(self) -> tuple[ArrayShape, ...]:
        """All arrays of the cache, those of one group after those of another."""
        return tuple(array for group in self.cache or () for array in group.arrays)

    def copied(self, content: CopiedContent) -> tuple[ArrayShape, ...]:
        """Return the arrays of the cache that hold pages, or states."""
        return tuple(self.arrays[index] for index in self.places(content))

    def places(self, content: CopiedContent) -> list[int]:
        """Return the indices of these arrays among all."""
        kinds = [group.kind for group in self.cache or () for _ in group.arrays]
        return [index for index, kind in enumerate(kinds) if (kind == "state") == (content == "states")]

    def batches(self, content: CopiedContent) -> tuple[int, ...]:
        """Return the numbers of pages, or of slots, of a data rank that programs copy, smallest first."""
        if content == "pages":
            return self.page_batches
        return (1,) if self.page_batches and self.places("states") else ()


def batch_sharding(pool: jax.sharding.Sharding) -> jax.sharding.NamedSharding:
    """Return the sharding of batches of pages, `[B, L, K, S, H]`, or of slots: split like the pool by data ranks and heads, else
    replicated."""
    assert isinstance(pool, jax.sharding.NamedSharding), "a pool lies on a mesh"
    layers, pages, *rest = (*pool.spec, None, None)[: max(2, len(pool.spec))]
    return jax.sharding.NamedSharding(pool.mesh, jax.sharding.PartitionSpec(pages, layers, *rest))


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The functions that copy equally many pages, or slots, of every data rank, and their operands."""

    read: Callable[..., Any]
    """Takes `pools` and `blocks`, returns `batches`."""
    write: Callable[..., Any]
    """Takes `pools` (DONATED), `blocks` and `batches`, returns the pools."""
    pools: tuple[jax.ShapeDtypeStruct, ...]
    blocks: jax.ShapeDtypeStruct
    batches: tuple[jax.ShapeDtypeStruct, ...]


def page_copy(sharding: Sharding, arrays: Sequence[ArrayShape], count: int) -> PageCopy:
    """Return the copy of `count` pages of every rank. Their axis comes first in the batches; heads stay where they are."""
    num_ranks, ranks = sharding.rules.count("pages"), sharding.place(("pages",))
    pools = tuple(
        jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=sharding.place(array.axes))
        for array in arrays
    )
    batches = tuple(
        jax.ShapeDtypeStruct(
            (num_ranks * count, pool.shape[0], *pool.shape[2:]), pool.dtype, sharding=batch_sharding(pool.sharding)
        )
        for pool in pools
    )
    read, write = read_pages, write_pages
    if num_ranks > 1:
        of_pools, of_batches = (tuple(each.sharding.spec for each in structs) for structs in (pools, batches))
        on_ranks = partial(jax.shard_map, mesh=sharding.mesh, check_vma=False)
        read = on_ranks(read_pages, in_specs=(of_pools, ranks.spec), out_specs=of_batches)
        write = on_ranks(write_pages, in_specs=(of_pools, ranks.spec, *of_batches), out_specs=of_pools)
    return PageCopy(read, write, pools, jax.ShapeDtypeStruct((num_ranks * count,), jnp.int32, sharding=ranks), batches)


CopiedContent = Literal["pages", "states"]
StateKind = Literal[
    "cache",
    "slots",
    "init_slot",
    "masks",
    "tables",
    "table_row",
    "drafts",
    "read_pages",
    "write_pages",
    "read_states",
    "write_states",
    "images",
    "activations",
]


@dataclass(frozen=True, slots=True)
class StateProgram:
    """A program that creates the cache, the slots or the page tables, writes a request's row or some masks, or copies pages."""

    kind: StateKind
    shapes: StateShapes
    num_pages: int = 0
    """Pages or slots of a data rank that it copies."""

    @property
    def name(self) -> str:
        return f"state/{self.kind}" + (f"/{self.num_pages}" if self.num_pages else "")


def state_programs(shapes: StateShapes) -> tuple[StateProgram, ...]:
    """Return every state program that an engine with these shapes needs."""
    kinds: list[StateKind] = []
    kinds += ["cache"] if shapes.cache is not None else []
    kinds += ["slots", "init_slot", "masks"] if shapes.num_slots else []
    kinds += ["tables", "table_row"] if shapes.max_pages else []
    kinds += ["images"] if shapes.images is not None else []
    kinds += ["activations"] if shapes.images is not None and shapes.images.activations else []
    kinds += ["drafts"] if shapes.num_drafts else []
    pages: list[StateKind] = ["read_pages", "write_pages"]
    states: list[StateKind] = ["read_states", "write_states"]
    return (
        *(StateProgram(kind, shapes) for kind in kinds),
        *(StateProgram(kind, shapes, size) for size in shapes.batches("pages") for kind in pages),
        *(StateProgram(kind, shapes, size) for size in shapes.batches("states") for kind in states),
    )


def new_cache(shapes: CacheShapes, arrays: Sequence[Any]) -> Cache:
    """Return the cache over `arrays`, those of one group after those of another."""
    rest = iter(arrays)
    return tuple(assemble(group.kind, [next(rest) for _ in group.arrays]) for group in shapes)


class DeviceState:
    """The state arrays of one engine. Steps replace `arrays`; the executables of state programs update them between steps."""

    def __init__(self, shapes: StateShapes, executables: Mapping[StateProgram, jax.stages.Compiled]) -> None:
        self._shapes = shapes
        self._call = {program.kind: compiled for program, compiled in executables.items() if not program.num_pages}
        self._copy: dict[tuple[str, int], jax.stages.Compiled] = {
            (program.kind, program.num_pages): compiled for program, compiled in executables.items()
        }
        self.arrays = self._new_arrays()
        self._provider: native.MemoryProvider | None = None
        self._provides_memory = False
        self.last_step_s = -math.inf
        """The time of `time.monotonic` at which the last step was dispatched."""

    def _new_arrays(self) -> StateArrays:
        """Zeroed, because a masked NaN in the pool would still poison a sum."""
        shapes = self._shapes
        cache = None if shapes.cache is None else new_cache(shapes.cache, jax.block_until_ready(self._call["cache"]()))
        if shapes.max_pages:
            self._sent = SentTables(shapes.num_slots, shapes.max_pages, shapes.pool_shape[3], shapes.num_tables)
        return StateArrays(
            cache,
            self._call["slots"]() if "slots" in self._call else None,
            self._call["tables"]() if "tables" in self._call else None,
            self._call["images"]() if "images" in self._call else None,
            self._call["drafts"]() if "drafts" in self._call else None,
            self._call["activations"]() if "activations" in self._call else None,
        )

    def provide_memory(self) -> None:
        """Have the system provide all memory of the cache in the background, between requests; returns at once.

        `release` ends it, and `renew` begins again with the new arrays.
        """
        self._provides_memory = self._shapes.backend in NATIVE
        if self._provides_memory:
            arrays = jax.tree.leaves(self.arrays.cache)
            self._provider = native.MemoryProvider(arrays, num_cores(), is_busy=self._is_busy)

    def _is_busy(self) -> bool:
        """Return True while a step is computed, or may come at any moment. Another thread than that of the steps may call this."""
        with contextlib.suppress(RuntimeError):  # raised for arrays that were given to the next step meanwhile
            if all(array.is_ready() for array in jax.tree.leaves(self.arrays.cache)):
                return time.monotonic() < self.last_step_s + _IDLE_S
        return True

    def init_slots(self, inits: Sequence[SlotInit], masks: Sequence[Mask]) -> None:
        """Write the rows of requests that take their slots, then the token masks of some slots."""
        slots = self.arrays.slots
        for init in inits:
            slots = self._call["init_slot"](slots, np.int32(init.slot), slot_row(init, self._shapes.vocab_size))
            self.arrays = self.arrays._replace(slots=slots)
        for start in range(0, len(masks), MASKS_AT_ONCE):
            rows = mask_rows(masks[start : start + MASKS_AT_ONCE], self._shapes.num_slots, self._shapes.vocab_size)
            slots = self._call["masks"](slots, *rows)
            self.arrays = self.arrays._replace(slots=slots)

    def send_tables(self, plan: StepPlan, places: np.ndarray, pages: np.ndarray) -> None:
        """Fill in the entries of page tables that `plan` changes; rows with too many of them are written at once.

        places, pages: fields of the step's packed plan, int32 `[T]`.
        """
        changes = self._sent.update(plan, len(places))
        count = len(changes.places)
        places[:count], pages[:count] = changes.places, changes.pages
        for slot, row in changes.whole_rows:
            tables = self._call["table_row"](self.arrays.tables, np.int32(slot), row)
            self.arrays = self.arrays._replace(tables=tables)

    @property
    def shapes(self) -> StateShapes:
        return self._shapes

    def read(self, content: CopiedContent, blocks: Int[np.ndarray, "B"]) -> tuple[jax.Array, ...]:
        """Dispatch copies of pages or slots: a batch `[B, L, ...]` for each array. blocks: equally many of every data rank, each
        counted within its rank."""
        arrays = self._copied(content)
        size = len(blocks) // self.num_ranks(content)
        copies: tuple[jax.Array, ...] = self._copy[f"read_{content}", size](arrays, blocks)
        return copies

    def stage(self, content: CopiedContent, batches: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Start to copy batches of pages or slots, one for each array, to the devices; any thread may call it."""
        arrays = self._copied(content)
        return tuple(
            jax.device_put(batch, batch_sharding(array.sharding)) for batch, array in zip(batches, arrays, strict=True)
        )

    def write(self, content: CopiedContent, blocks: Int[np.ndarray, "B"], copies: tuple[jax.Array, ...]) -> None:
        """Dispatch the write of `copies` into these pages or slots, counted as in `read`. If it raises, the arrays are new and
        zeroed."""
        arrays, size = self._copied(content), len(blocks) // self.num_ranks(content)
        try:
            written = self._copy[f"write_{content}", size](arrays, blocks, *copies)
        except Exception:
            self.renew()
            raise
        leaves = jax.tree.leaves(self.arrays.cache)
        for place, array in zip(self._shapes.places(content), written, strict=True):
            leaves[place] = array
        self.arrays = self.arrays._replace(cache=new_cache(self._shapes.cache or (), leaves))

    def num_ranks(self, content: CopiedContent) -> int:
        """Return the number of data ranks that share the pages or slots."""
        first = self._copied(content)[0]
        return int(first.shape[1] // first.sharding.shard_shape(first.shape)[1])

    def _copied(self, content: CopiedContent) -> tuple[jax.Array, ...]:
        """Return the arrays that hold pages, or states."""
        leaves = jax.tree.leaves(self.arrays.cache)
        return tuple(leaves[place] for place in self._shapes.places(content))

    def release(self) -> None:
        """Give the memory of the arrays back; `renew` makes new ones."""
        if self._provider is not None:
            self._provider.stop()
            self._provider = None
        with contextlib.suppress(Exception):  # waits for the steps that were dispatched after a failed one
            jax.block_until_ready(self.arrays.cache)
        for array in jax.tree.leaves(self.arrays):
            array.delete()

    def renew(self) -> None:
        """Replace the arrays by zeroed ones. The old ones go first: there is no memory for two pools."""
        self.release()
        self.arrays = self._new_arrays()
        if self._provides_memory:
            self.provide_memory()
