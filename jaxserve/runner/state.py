"""State on the devices: the cache and the slots, and the programs that create and update them between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxserve_kernels import native
from jaxserve_kernels.backend import NATIVE, Backend
from jaxtyping import Array, Float, Int

from jaxserve.layers.cache import ArrayShape, Cache, CacheShapes, assemble
from jaxserve.runner.images.encoder import ImageShape
from jaxserve.runner.page_tables import SentTables
from jaxserve.runner.slots import MASKS_AT_ONCE, mask_rows, slot_row
from jaxserve.sampling.params import SlotInit
from jaxserve.scheduler.plan import Mask, StepPlan


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
    activations: Float[Array, "P D"] | None = None
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
    """Numbers of pages that one program copies between pool and host; none without tiers."""
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


def batch_sharding(pool: jax.sharding.Sharding) -> jax.sharding.NamedSharding:
    """Return the sharding of batches of pages, `[B, L, K, S, H]`: split by heads like the pool, else replicated."""
    assert isinstance(pool, jax.sharding.NamedSharding), "a pool lies on a mesh"
    heads = pool.spec[2] if len(pool.spec) > 2 else None
    return jax.sharding.NamedSharding(pool.mesh, jax.sharding.PartitionSpec(None, None, heads))


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
    "images",
    "activations",
]


@dataclass(frozen=True, slots=True)
class StateProgram:
    """A program that creates the cache, the slots or the page tables, writes a request's row or some masks, or copies pages."""

    kind: StateKind
    shapes: StateShapes
    num_pages: int = 0
    """Pages that it copies."""

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
    kinds += ["activations"] if shapes.images is not None and shapes.images.activations is not None else []
    kinds += ["drafts"] if shapes.num_drafts else []
    copies: list[StateKind] = ["read_pages", "write_pages"]
    return (
        *(StateProgram(kind, shapes) for kind in kinds),
        *(StateProgram(kind, shapes, size) for size in shapes.page_batches for kind in copies),
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
        self._copy = {(program.kind, program.num_pages): compiled for program, compiled in executables.items()}
        self.arrays = self._new_arrays()
        self._provider: native.MemoryProvider | None = None
        self._provides_memory = False

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
        """Have the system provide all memory of the cache in the background; returns at once.

        `release` ends it, and `renew` begins again with the new arrays.
        """
        self._provides_memory = self._shapes.backend in NATIVE
        if self._provides_memory:
            self._provider = native.MemoryProvider(jax.tree.leaves(self.arrays.cache))

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
    def page_batches(self) -> tuple[int, ...]:
        """Numbers of pages that `read_pages` and `write_pages` take."""
        return self._shapes.page_batches

    @property
    def page_arrays(self) -> tuple[ArrayShape, ...]:
        """The arrays that have pages: with tiers, all of the cache."""
        return self._shapes.arrays

    def read_pages(self, blocks: Int[np.ndarray, "B"]) -> tuple[jax.Array, ...]:
        """Dispatch copies of these pages: a batch `[B, L, K, S, H]` for each array."""
        copies: tuple[jax.Array, ...] = self._copy["read_pages", len(blocks)](self._pools, blocks)
        return copies

    def stage(self, batches: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Start to copy batches of pages, one for each array, to the devices; any thread may call it."""
        pools = self._pools
        return tuple(
            jax.device_put(batch, batch_sharding(pool.sharding)) for batch, pool in zip(batches, pools, strict=True)
        )

    def write_pages(self, blocks: Int[np.ndarray, "B"], copies: tuple[jax.Array, ...]) -> None:
        """Dispatch the write of `copies` into these pages. If it raises, the arrays are new and zeroed."""
        try:
            written = self._copy["write_pages", len(blocks)](self._pools, blocks, *copies)
        except Exception:
            self.renew()
            raise
        self.arrays = self.arrays._replace(cache=new_cache(self._shapes.cache or (), written))

    @property
    def _pools(self) -> tuple[jax.Array, ...]:
        """The arrays of `page_arrays` on the devices."""
        return tuple(jax.tree.leaves(self.arrays.cache))

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
