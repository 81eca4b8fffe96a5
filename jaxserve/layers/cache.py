"""The cache of a model on the devices: one entry per cache group, in the order of `DecoderConfig.cache.groups`.

Steps take the cache (DONATED) and return it in the same buffers. Letters: L layers of a group, P pages, K KV heads, S
tokens of a page, H head dim, W width of a latent vector, I of an indexer's key, Y state slots, B rows of a step, or pages that are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxserve_kernels.paged_attention import Paging
from jaxtyping import Array, Float, Int, Num

from jaxserve.model_config.cache import CacheGroup, CacheKind, CachePlace


class KVPool(NamedTuple):
    """Keys and values of the layers of a full or sliding group."""

    k: Num[Array, "L P K S H"]
    v: Num[Array, "L P K S H"]


class LatentPool(NamedTuple):
    """Vectors of the layers of a latent group, or of blocks of tokens, then of fewer slots: see `CacheGroup.rate`."""

    latents: Float[Array, "L P 1 S W"]


class IndexPool(NamedTuple):
    """Keys of the indexers of the layers of an index group."""

    keys: Float[Array, "L P 1 S I"]


class StatePool(NamedTuple):
    """Recurrent states of the layers of a state group, in the order of `CacheGroup.arrays`; each `[L, Y, *shape]`."""

    arrays: tuple[Array, ...]


class PendingStates(NamedTuple):
    """The states of a group during a step that may go back: it reads them, and writes them once it is known how many of its
    tokens stay (`mixers.settle`)."""

    pool: StatePool
    inputs: tuple[tuple[Array, ...], ...] = ()
    """Inputs of the recurrence of each layer so far, arrays `[T, ...]` (`RecurrentMixer.project`)."""


class ChosenTokens(NamedTuple):
    """An index group during a step, after the first of its layers."""

    pool: IndexPool
    positions: Int[Array, "*R T C"]
    """The tokens that the last indexer has chosen for each token of the step (`sparse_attention.write_and_choose`)."""


GroupCache = KVPool | LatentPool | IndexPool | StatePool | PendingStates | ChosenTokens
Cache = tuple[GroupCache, ...]


class StateSlots(NamedTuple):
    """Places of the rows' recurrent states.

    The first slot of each data rank holds zeros and is never written: a row at position 0 reads it. Rows that must not write have the slot after
    the last one, and their writes are dropped (`array.at[layer, writes].set(state, mode="drop")`). A row may read one
    slot and write another; then the slot that it read keeps its content.
    """

    reads: Int[Array, "B"]
    """Slot with the state before the row's first token."""
    writes: Int[Array, "B"]
    """Slot for the state after the row's last token."""


GroupStep = Paging | StateSlots
"""Places of a step's tokens in one group."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of a cache group on the devices."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    """Logical axes, as in `sharding.rules`."""


@dataclass(frozen=True, slots=True)
class GroupShapes:
    """The arrays of one cache group."""

    kind: CacheKind
    arrays: tuple[ArrayShape, ...]
    table: int = 0
    """See `CacheGroup.table`."""


CacheShapes = tuple[GroupShapes, ...]


def pool_shapes(shape: tuple[int, ...], dtype: Any) -> CacheShapes:
    """Return the shapes of a cache of one group with keys and values `[L, P, K, S, H]`."""
    half = ArrayShape(shape, str(dtype), (None, "pages", "kv_heads"))
    return (GroupShapes("full", (half, half)),)


def group_shapes(
    group: CacheGroup, count: int, page_size: int, kv_dtype: Any, activations: Any, heads: tuple[int, int] | None = None
) -> GroupShapes:
    """Return the arrays of a group.

    count: pages, the null page included, or state slots, the zero slot included. heads: number and dim of the heads as
    the device lays them out; None: those of the group.
    """
    num_layers = group.num_layers
    if not group.has_pages:
        return GroupShapes(
            group.kind,
            tuple(
                ArrayShape(
                    (num_layers, count, *array.shape),
                    array.dtype if array.dtype == "float32" else str(activations),
                    (None, "pages", *array.axes),
                )
                for array in group.arrays
            ),
        )
    num_heads, dim = heads or (group.num_kv_heads, group.head_dim)
    shape = (num_layers, count, num_heads, group.slots(page_size), dim)
    if group.has_vectors:
        return GroupShapes(group.kind, (ArrayShape(shape, str(kv_dtype), (None, "pages")),), group.table)
    return GroupShapes(group.kind, pool_shapes(shape, kv_dtype)[0].arrays, group.table)


def assemble(kind: CacheKind, arrays: Sequence[Any]) -> GroupCache:
    """Return the cache of a group over these arrays, or over whatever stands for them."""
    match kind:
        case "state":
            return StatePool(tuple(arrays))
        case "latent" | "compressed":
            return LatentPool(*arrays)
        case "index":
            return IndexPool(*arrays)
        case _:
            return KVPool(*arrays)


def with_pending_states(cache: Cache) -> Cache:
    """Return the cache for a step whose last tokens may not stay."""
    return tuple(PendingStates(group) if isinstance(group, StatePool) else group for group in cache)


def without_chosen(cache: Cache) -> Cache:
    """Return the cache after the last layer of a step, without what indexers have chosen in it."""
    return tuple(group.pool if isinstance(group, ChosenTokens) else group for group in cache)


def pages_shape(cache: Cache) -> tuple[int, ...]:
    """Return the shape of the first array that has a slot for each token of a page: `[L, P, K, S, H]`."""
    paged = [group for group in cache if not isinstance(group, StatePool | PendingStates)]
    shapes: list[tuple[int, ...]] = [array.shape for array in jax.tree.leaves(paged)]
    return max(shapes, key=lambda shape: shape[3])


def with_group(cache: Cache, place: CachePlace, pool: GroupCache) -> Cache:
    """Return `cache` with another entry for the group of `place`."""
    return (*cache[: place.group], pool, *cache[place.group + 1 :])


def read_pages(arrays: Sequence[Num[Array, "_ P ..."]], blocks: Int[Array, "B"]) -> tuple[Num[Array, "B _ ..."], ...]:
    """Return copies of pages, or of slots of states, made one after the other: a batch for each of the arrays.

    A gather along the page axis, which is not the first one, would make XLA transpose the whole pool.
    """

    def copy(place: int | Array, copies: tuple[Array, ...]) -> tuple[Array, ...]:
        def one(array: Array, batch: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(array, blocks[place], 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(batch, jnp.moveaxis(page, 1, 0), place, axis=0)

        return tuple(map(one, arrays, copies))

    empty = (jnp.zeros((len(blocks), len(array), *array.shape[2:]), array.dtype) for array in arrays)
    copies: tuple[Array, ...] = jax.lax.fori_loop(0, len(blocks), copy, tuple(empty))
    return copies


def write_pages(
    arrays: Sequence[Num[Array, "_ P ..."]], blocks: Int[Array, "B"], *batches: Num[Array, "B _ ..."]
) -> tuple[Num[Array, "_ P ..."], ...]:
    """Overwrite pages, one after the other as in `read_pages`. DONATES the arrays."""

    def copy(place: int | Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        def one(array: Array, batch: Array) -> Array:
            page = jax.lax.dynamic_slice_in_dim(batch, place, 1, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(array, jnp.moveaxis(page, 0, 1), blocks[place], axis=1)

        return tuple(map(one, arrays, batches))

    written: tuple[Array, ...] = jax.lax.fori_loop(0, len(blocks), copy, tuple(arrays))
    return written
