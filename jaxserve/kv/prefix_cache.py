"""Which pages hold the start of a prompt already.

A full page is named by sha256 over its parent's name and its tokens; the first parent is the hash of the
request's salt and adapter. So a name stands for the page's whole past, prompts with different ones share nothing,
and nobody can craft a collision. Pages are named only after their tokens were computed.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from jaxserve.types import BlockHash


class HashChain:
    """The names of one request's full pages, computed when first asked for.

    A cold prompt costs one hash at look-up, not one per page. The tokens of a request never change,
    therefore the chain stays valid through preemption and growth.
    """

    __slots__ = ("_block_size", "_names", "_root")

    def __init__(self, block_size: int, salt: str | None, adapter: int = 0) -> None:
        self._block_size = block_size
        self._root = sha256(b"unsalted" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")).digest()
        if adapter:
            self._root = sha256(b"adapter:%d:" % adapter + self._root).digest()
        self._names: list[BlockHash] = []

    def name(self, index: int, tokens: np.ndarray) -> BlockHash:
        """The name of page `index` of a request with these `tokens`; the page must be full."""
        while len(self._names) <= index:
            start = len(self._names) * self._block_size
            content = tokens[start : start + self._block_size]
            if len(content) < self._block_size:
                raise ValueError(f"page {len(self._names)} is not full: it has {len(content)} tokens")
            parent = self._names[-1] if self._names else self._root
            self._names.append(BlockHash(sha256(parent + content.tobytes()).digest()))
        return self._names[index]
