"""Hashes of full pages, under which the prefix cache finds them.

The hash of a page is sha256 over the hash of the page before it and its own tokens; before the first page stands a hash
of the request's salt and adapter. So a hash identifies the whole prefix, requests with different salts or adapters share
nothing, and a collision cannot be crafted. Pages are cached only after their tokens were computed.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from jaxserve.types import BlockHash


class HashChain:
    """The hashes of one request's full pages, computed when first asked for.

    A cold prompt costs one hash at look-up, not one per page. The tokens of a request never change,
    therefore the chain stays valid through preemption and growth.
    """

    __slots__ = ("_block_size", "_hashes", "_root")

    def __init__(self, block_size: int, salt: str | None, adapter: int = 0) -> None:
        self._block_size = block_size
        self._root = sha256(b"unsalted" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()
        if adapter:
            self._root = sha256(b"adapter:%d:" % adapter + self._root).digest()
        self._hashes: list[BlockHash] = []

    def hash(self, index: int, tokens: np.ndarray) -> BlockHash:
        """Return the hash of page `index` of a request with these `tokens`; the page must be full."""
        while len(self._hashes) <= index:
            start = len(self._hashes) * self._block_size
            content = tokens[start : start + self._block_size]
            if len(content) < self._block_size:
                raise ValueError(f"page {len(self._hashes)} is not full: it has {len(content)} tokens")
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(BlockHash(sha256(parent + content.tobytes()).digest()))
        return self._hashes[index]
