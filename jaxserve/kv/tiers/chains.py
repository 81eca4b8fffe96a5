"""Page hashes of an engine whose pages outlive it, or that other engines fetch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from jaxserve.kv.block_table import HashChain


def shared_chains(
    block_size: int, num_adapters: int
) -> Callable[[str | None, int, Sequence[tuple[int, int, bytes]]], HashChain]:
    """Return a function that makes the hashes of a request from its salt, adapter and images.

    num_adapters: adapters of the start, of which the tiers' layout has a digest. An adapter with a higher number was loaded while
    this engine serves; another engine gives its number to another adapter, so its pages have hashes of this engine alone.
    """
    nonce = secrets.token_hex(16)

    def make(salt: str | None, adapter: int, images: Sequence[tuple[int, int, bytes]]) -> HashChain:
        own = salt if adapter <= num_adapters else f"{nonce}:{salt}" if salt is not None else nonce
        return HashChain(block_size, own, adapter, images)

    return make
