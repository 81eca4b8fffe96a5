"""Prefix affinity by text, as Ray Serve's PrefixCacheAffinityRouter has it; for comparison.

Ray keeps the texts of routed requests in a prefix tree. While queues are balanced, the replica with the longest match
gets the request if the match covers a share of the text; otherwise the replica with the least text. Differences: texts
are compared in chunks instead of single characters, and in place of the best of two random replicas stands the least
loaded one, so that the choice is deterministic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Final

from jaxserve.routing.policy import by_load
from jaxserve.routing.replica import Replica, ReplicaId
from jaxserve.routing.request import RouteRequest

CHUNK_CHARS: Final = 32

Chunks = OrderedDict[bytes, None]
"""Chained hashes of chunks of text, least recently routed first."""


class TextPrefix:
    """Remembers the texts that it routed to each replica; what replicas hold, it does not know."""

    def __init__(
        self, *, imbalanced_threshold: int = 10, match_rate_threshold: float = 0.1, max_chars: int = 400_000
    ) -> None:
        """Defaults are Ray's.

        imbalanced_threshold: difference between the most and the fewest requests of a replica beyond which only the
        load counts. match_rate_threshold: least share of a text that must match. max_chars: characters to remember of
        each replica.
        """
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        self._max_chunks = max_chars // CHUNK_CHARS
        self._chunks: dict[ReplicaId, Chunks] = {}

    def rank(self, request: RouteRequest, replicas: Sequence[Replica]) -> list[Replica]:
        numbers = [replica.num_requests for replica in replicas]
        if not replicas or max(numbers) - min(numbers) > self._imbalanced_threshold:
            return sorted(replicas, key=by_load)
        chunks = text_chunks(request.text)
        matched = {replica.replica_id: self._num_matched(replica.replica_id, chunks) for replica in replicas}
        if max(matched.values()) * CHUNK_CHARS < self._match_rate_threshold * len(request.text) or not chunks:
            return sorted(replicas, key=lambda replica: (self._num_chunks(replica.replica_id), *by_load(replica)))
        return sorted(replicas, key=lambda replica: (-matched[replica.replica_id], *by_load(replica)))

    def note_routed(self, request: RouteRequest, replica_id: ReplicaId) -> None:
        known = self._chunks.setdefault(replica_id, OrderedDict())
        for chunk in reversed(text_chunks(request.text)):  # the end of a text is forgotten before its start
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > self._max_chunks:
            known.popitem(last=False)

    def forget(self, replica_id: ReplicaId) -> None:
        self._chunks.pop(replica_id, None)

    def _num_matched(self, replica_id: ReplicaId, chunks: Sequence[bytes]) -> int:
        known: Collection[bytes] = self._chunks.get(replica_id, ())
        return next((index for index, chunk in enumerate(chunks) if chunk not in known), len(chunks))

    def _num_chunks(self, replica_id: ReplicaId) -> int:
        return len(self._chunks.get(replica_id, ()))


def text_chunks(text: str) -> list[bytes]:
    """Return a hash of each full chunk of `text` together with all text before it."""
    digest, chunks = sha256(), []
    for start in range(0, len(text) - CHUNK_CHARS + 1, CHUNK_CHARS):
        digest.update(text[start : start + CHUNK_CHARS].encode("utf-8", "surrogatepass"))
        chunks.append(digest.digest())
    return chunks
