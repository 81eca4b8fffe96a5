"""The pages of one request, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from jaxserve.types import NULL_BLOCK, BlockHash, BlockId


class HashChain:
    """The hashes of one request's full pages, under which the prefix cache finds them; computed when first asked for.

    The hash of a page is sha256 over the hash of the page before it and its own tokens; before the first page stands a
    hash of the request's salt and adapter. A page with tokens of images has their digests and starts in its hash, since tokens
    of all images are alike. So a hash identifies the whole prefix, requests with different salts or
    adapters share nothing, and a collision cannot be crafted.

    A cold prompt costs one hash at look-up, not one per page. The tokens of a request never change,
    therefore the chain stays valid through preemption and growth.
    """

    __slots__ = ("_block_size", "_hashes", "_images", "_own", "_root")

    def __init__(
        self,
        block_size: int,
        salt: str | None,
        adapter: int = 0,
        images: Sequence[tuple[int, int, bytes]] = (),
        known: Sequence[BlockHash] = (),
    ) -> None:
        """images: first token, end and digest of each image of the prompt. known: the hashes of the first pages, which are not
        computed then."""
        self._block_size = block_size
        self._images = images
        self._root = sha256(b"unsalted" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()
        if adapter:
            self._root = sha256(b"adapter:%d:" % adapter + self._root).digest()
        self._own = self._root
        """The root for the weights of the start."""
        self._hashes = list(known)

    def name_weights(self, name: str) -> None:
        """Compute all hashes anew: pages of the weights of this name share none with those of others. "": the weights of the start."""
        self._root = self._own if not name else sha256(b"weights:" + name.encode() + b":" + self._own).digest()
        self._hashes.clear()

    @property
    def known(self) -> list[BlockHash]:
        """Return the hashes that have been asked for, of the first pages. Any thread may ask."""
        return list(self._hashes)

    def num_full(self, tokens: np.ndarray) -> int:
        """Return the number of pages that `tokens` fill."""
        return len(tokens) // self._block_size

    def hash(self, index: int, tokens: np.ndarray) -> BlockHash:
        """Return the hash of page `index` of a request with these `tokens`; the page must be full."""
        while len(self._hashes) <= index:
            start = len(self._hashes) * self._block_size
            content = tokens[start : start + self._block_size]
            if len(content) < self._block_size:
                raise ValueError(f"page {len(self._hashes)} is not full: it has {len(content)} tokens")
            parent = self._hashes[-1] if self._hashes else self._root
            end = start + self._block_size
            images = b"".join(
                digest + first.to_bytes(8, "little")
                for first, last, digest in self._images
                if first < end and start < last
            )
            self._hashes.append(BlockHash(sha256(parent + content.tobytes() + images).digest()))
        return self._hashes[index]


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """The state of the pool when a table last got no pages."""

    num_tokens: int
    num_cached: int
    """Cached pages that the request starts with."""
    num_held: int
    """Cached pages that requests held: the others save nothing, since they count as free."""
    next_hash: BlockHash | None
    """The hash of the first page that was not cached; None if all were."""
    num_gains: int
    """`BlockPool.num_gains` at that time."""


class WindowTable:
    """The pages of one request in a sliding-window group: those from `first` to `end`; other entries are null."""

    __slots__ = ("end", "entries", "first")

    def __init__(self, entries: np.ndarray) -> None:
        self.entries = entries
        """Part of the row that the device reads."""
        self.first = 0
        self.end = 0

    def append(self, blocks: Sequence[BlockId]) -> None:
        self.entries[self.end : self.end + len(blocks)] = blocks
        self.end += len(blocks)

    def clear(self) -> None:
        self.entries[self.first : self.end] = NULL_BLOCK
        self.first = self.end = 0


class RequestState:
    """The recurrent state of one request, see `kv.states`."""

    __slots__ = ("kept", "pinned", "places", "slot", "snapshot_at", "spare")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Return to the state of a request that has not started."""
        self.slot = 0
        """The slot with the state after the computed tokens, those of steps in flight included."""
        self.spare: int | None = None
        """The slot that the first step will write."""
        self.pinned: BlockHash | None = None
        """Name of the snapshot that the first step reads."""
        self.places: tuple[int, ...] = ()
        """Numbers of computed tokens at which a chunk must end."""
        self.snapshot_at: int | None = None
        """Computed tokens, if the state in `slot` is to be kept as a snapshot."""
        self.kept: list[tuple[int, int]] = []
        """Computed tokens and slot of snapshots that are not published."""


class BlockTable:
    """Page i holds tokens `i * block_size ... (i + 1) * block_size - 1`. The table grows until it is cleared.

    The tables of sliding-window groups follow it in `row`: each has `max_blocks` entries.
    """

    __slots__ = (
        "chain",
        "failure",
        "num_blocks",
        "num_found",
        "num_published",
        "pending",
        "rank",
        "row",
        "state",
        "windows",
    )

    def __init__(self, max_blocks: int, chain: HashChain, num_windows: int = 0) -> None:
        self.row = np.full((1 + num_windows) * max_blocks, NULL_BLOCK, np.int32)  # as the device reads it
        self.windows = tuple(WindowTable(self.row[i * max_blocks :][:max_blocks]) for i in range(1, 1 + num_windows))
        self.state = RequestState()
        self.num_blocks = 0
        self.num_published = 0
        """Leading pages that are cached, or whose content another page has in the cache."""
        self.num_found = 0
        """Leading pages that tiers were found to have, for a request that has not started."""
        self.chain = chain
        self.pending: BlockHash | None = None
        """The last page of a prefix that other requests can share, while this request computes it."""
        self.failure: AllocationFailure | None = None
        self.rank = 0
        """Data rank that all pages and state slots belong to."""

    def name_weights(self, name: str) -> None:
        """Let an empty table have pages of the weights of this name."""
        self.chain.name_weights(name)
        self.failure = None
        self.num_found = 0

    @property
    def blocks(self) -> list[BlockId]:
        return [BlockId(block) for block in self.row[: self.num_blocks].tolist()]

    def append(self, blocks: Sequence[BlockId]) -> None:
        end = self.num_blocks + len(blocks)
        self.row[self.num_blocks : end] = blocks
        self.num_blocks = end

    def clear(self) -> None:
        self.row[: self.num_blocks] = NULL_BLOCK
        self.num_blocks = self.num_published = self.num_found = 0
