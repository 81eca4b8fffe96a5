"""Cache groups as data: layers of a decoder that store the same kind of cache between steps.

    kind        stores                                                     grows with
    full        keys and values of every token, in pages                   the text
    sliding     keys and values of the last `window` tokens, in pages      the text, up to the window
    latent      one vector per token that all heads read (MLA), in pages   the text, up to the window if there is one
    compressed  one vector for each block of `rate` tokens, in pages       the text
    index       one key per token or block that an indexer reads, in pages the text
    state       arrays of fixed shape, in a slot per request               nothing

A layer has at most one place in a group of keys and values or vectors, one in an index group and one in a state group: layers
of Falcon-H1 have the first and the last. Layers with embeddings of several tokens have a place in two further state groups. Layers with compressed blocks have a place in two further groups: one of the blocks' vectors,
and one of what the last tokens add to the next of them. A layer that reads the keys and values of another layer, or attends to the tokens that
another layer's indexer has chosen, has that layer's place, and stores nothing there. A model without attention has a group
without layers, with pages of one number for each token: prefixes are found by pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

CacheKind = Literal["full", "sliding", "latent", "compressed", "index", "state"]
_ORDER: Final[tuple[CacheKind, ...]] = ("full", "compressed", "latent", "sliding", "index", "state")
"""The first group grows with the text, if one does."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's recurrent state, for one request."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "activations"] = "float32"
    axes: tuple[str | None, ...] = ()
    """Logical axis of each dimension, as in `sharding.rules`; dimensions without one are never split."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that store the same kind and shape of cache."""

    kind: CacheKind
    layers: tuple[int, ...] = ()
    """Decoder layers that own storage in this group: place i is that of layer `layers[i]`."""
    num_kv_heads: int = 1
    head_dim: int = 0
    """Width of a key and of a value; in groups of vectors the width of the one vector. 0 in a state group."""
    window: int | None = None
    """Tokens that a query attends to, itself included, or that a block is made of; sliding and latent groups only."""
    rate: int = 1
    """Tokens for which there is one vector."""
    arrays: tuple[StateArray, ...] = ()
    """Arrays of a state group."""
    table: int = 0
    """Page table of a request that the group reads: groups that keep the same tokens share one."""

    @property
    def has_pages(self) -> bool:
        """True if the group's cache grows with the text, in pages."""
        return self.kind != "state"

    @property
    def has_vectors(self) -> bool:
        """True if the group stores one vector per token, which devices do not split."""
        return self.kind in ("latent", "compressed", "index")

    def slots(self, page_size: int) -> int:
        """Return the vectors, or keys and values, that a page of `page_size` tokens has room for."""
        return -(-page_size // self.rate)

    @property
    def num_layers(self) -> int:
        """Layers that the group's arrays have: that of a group without layers holds nothing."""
        return len(self.layers) or 1


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The storage of one layer: groups that list no layers."""

    paged: CacheGroup | None = None
    state: CacheGroup | None = None
    source: int | None = None
    """Earlier layer whose pages it reads instead of its own."""
    index: CacheGroup | None = None
    """Keys of an indexer."""
    index_source: int | None = None
    """Earlier layer whose indexer has chosen the tokens that the layer attends to; None: its own."""
    added: CacheGroup | None = None
    """Numbers and scores that tokens add to the vectors of blocks."""
    blocks: CacheGroup | None = None
    """Vectors of blocks."""
    last_tokens: CacheGroup | None = None
    """Tokens before the next one, for embeddings of several tokens in a row."""
    last_inputs: CacheGroup | None = None
    """Last inputs of the convolution of such embeddings."""


@dataclass(frozen=True, slots=True)
class CachePlace:
    """The place of a layer's cache: the group, and the index in the group's arrays."""

    group: int
    index: int
    is_owner: bool = True
    """False for a layer that reads another layer's keys and values, or what its indexer has chosen."""


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """The places of one layer."""

    paged: CachePlace | None = None
    state: CachePlace | None = None
    index: CachePlace | None = None
    """Keys of the indexer that chooses the layer's tokens or blocks."""
    added: CachePlace | None = None
    """Numbers and scores that tokens add to the vectors of blocks."""
    blocks: CachePlace | None = None
    """Vectors of blocks."""
    last_tokens: CachePlace | None = None
    """Tokens before the next one, for embeddings of several tokens in a row."""
    last_inputs: CachePlace | None = None
    """Last inputs of the convolution of such embeddings."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache groups of a model, groups with pages first, and the places of its layers."""

    groups: tuple[CacheGroup, ...]
    places: tuple[LayerPlaces, ...]

    @property
    def paged(self) -> tuple[CacheGroup, ...]:
        """Groups with pages. There is at least one."""
        return tuple(group for group in self.groups if group.has_pages)

    @property
    def has_attention(self) -> bool:
        """True if layers have keys and values in pages."""
        return any(group.layers for group in self.paged)

    @property
    def num_tables(self) -> int:
        """Page tables of a request: one for the groups that grow with the text, and one for each window."""
        return 1 + max(group.table for group in self.groups)

    @property
    def states(self) -> tuple[CacheGroup, ...]:
        """State groups."""
        return tuple(group for group in self.groups if not group.has_pages)


def cache_layout(layers: Sequence[LayerCache]) -> CacheLayout:
    """Gather the storage of layers into groups."""
    owners: dict[CacheGroup, list[int]] = {}
    for index, layer in enumerate(layers):
        own_index = layer.index if layer.index_source is None else None
        for stored in (
            layer.paged if layer.source is None else None,
            layer.added,
            layer.blocks,
            own_index,
            layer.state,
            layer.last_tokens,
            layer.last_inputs,
        ):
            if stored is not None:
                owners.setdefault(stored, []).append(index)
    if not any(group.has_pages for group in owners):
        owners[CacheGroup("full", head_dim=1)] = []
    kinds = sorted(owners, key=lambda group: _ORDER.index(group.kind))  # stable: else in order of the first layer
    windows = list(dict.fromkeys(group.window for group in kinds if group.window is not None))

    def place(stored: CacheGroup | None, index: int, source: int | None = None) -> CachePlace | None:
        if stored is None:
            return None
        owner = index if source is None else source
        return CachePlace(kinds.index(stored), owners[stored].index(owner), is_owner=source is None)

    return CacheLayout(
        tuple(
            replace(kind, layers=tuple(owners[kind]), table=1 + windows.index(kind.window) if kind.window else 0)
            for kind in kinds
        ),
        tuple(
            LayerPlaces(
                place(layer.paged, index, layer.source),
                place(layer.state, index),
                place(layer.index, index, layer.index_source),
                place(layer.added, index),
                place(layer.blocks, index),
                place(layer.last_tokens, index),
                place(layer.last_inputs, index),
            )
            for index, layer in enumerate(layers)
        ),
    )
