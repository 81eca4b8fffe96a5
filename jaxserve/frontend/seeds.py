"""Seeds of requests: reproducible, and independent of what else is running."""

from __future__ import annotations

import hashlib
import itertools

_MASK = 2**31 - 1


def _hash(label: bytes, *numbers: int) -> int:
    text = b":".join([label, *(b"%d" % number for number in numbers)])
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & _MASK


def child_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with n > 1; choice 0 keeps the request's own."""
    return seed if index == 0 else _hash(b"child", seed, index)


class SeedStream:
    """Seeds for requests that bring none: the k-th draw depends on the server's seed and k alone.

    Of `stride` API processes, each draws every `stride`-th from its own `start` on, so that no two requests
    share a seed.
    """

    def __init__(self, seed: int, start: int = 0, stride: int = 1) -> None:
        self._seed = seed
        self._counter = itertools.count(start, stride)

    def draw(self) -> int:
        return _hash(b"request", self._seed, next(self._counter))
