"""The responses of one API process that can be asked for, and continued, later.

Bounded in number and bytes: the least recently used one is dropped first, and none stays longer than its time to
live after its last use.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.apis.responses.items import Item
from jaxserve.apis.responses.response import ResponseObject
from jaxserve.config import ResponsesConfig


class StoredResponse(msgspec.Struct):
    """A response and what it was given."""

    response: ResponseObject
    input: Annotated[list[Item], Meta(description="Without the items of the responses before it.")]


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    last_use_s: float


class ResponseStore:
    """Responses by id, encoded, so that the bound in bytes is one on memory."""

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The one that was used last at the end."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._entries

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, stored: StoredResponse) -> None:
        """Store a state in place of an earlier one, and drop others if needed. One larger than the store is not stored."""
        self.remove(stored.response.id)
        entry = _Entry(msgspec.msgpack.encode(stored), self._clock())
        self._entries[stored.response.id] = entry
        self._num_bytes += len(entry.data)
        while self._num_bytes > self._config.max_stored_bytes or len(self) > self._config.max_stored_responses:
            self.remove(next(iter(self._entries)))

    def get(self, response_id: str) -> bytes | None:
        """Return the response, encoded; None if it is not stored any more. Counts as a use."""
        self._forget_old()
        entry = self._entries.pop(response_id, None)
        if entry is None:
            return None
        self._entries[response_id] = _Entry(entry.data, self._clock())
        return entry.data

    def remove(self, response_id: str) -> bool:
        """Drop a response; return False if it is not stored."""
        self._forget_old()
        entry = self._entries.pop(response_id, None)
        self._num_bytes -= 0 if entry is None else len(entry.data)
        return entry is not None

    def _forget_old(self) -> None:
        oldest_use_s = self._clock() - self._config.response_ttl
        while self._entries and next(iter(self._entries.values())).last_use_s < oldest_use_s:
            self._num_bytes -= len(self._entries.popitem(last=False)[1].data)
