"""The responses of one API process that can be asked for, and continued, later.

Bounded in number and bytes: the least recently used one is dropped first, and none stays longer than its time to
live after its last use.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from jaxserve.apis.responses.items import (
    FunctionCallItem,
    InputImage,
    InputText,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from jaxserve.apis.responses.response import ResponseObject, ResponseStatus
from jaxserve.apis.schema.encode import encode_in_parts, is_large
from jaxserve.config import ResponsesConfig


class StoredResponse(msgspec.Struct):
    """A response and what it was given."""

    response: ResponseObject
    input: Annotated[list[Item], Meta(description="Without the items of the responses before it.")]


class KeptResponse(msgspec.Struct):
    """A stored response as JSON, of which no more is decoded than is needed: decoding the log-probabilities of 4,000 tokens
    keeps an event loop for a tenth of a second."""

    id: str
    status: ResponseStatus
    background: bool
    previous_response_id: str | None
    response: bytes
    input: bytes

    def input_items(self) -> list[Item]:
        """Return the items that it was given."""
        return _ITEMS.decode(self.input)

    def items(self) -> list[Item]:
        """Return the items of its input and its output, without log-probabilities."""
        output = [item.whole() if isinstance(item, _Message) else item for item in _OUTPUT.decode(self.response).output]
        return [*self.input_items(), *output]


class _Text(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str


class _Message(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the model, without log-probabilities."""

    id: str
    status: ItemStatus
    content: list[_Text]

    def whole(self) -> MessageItem:
        content: list[InputText | InputImage | OutputText] = [OutputText(text=part.text) for part in self.content]
        return MessageItem(id=self.id, status=self.status, role="assistant", content=content)


class _Output(msgspec.Struct):
    output: list[_Message | ReasoningItem | FunctionCallItem]


_ITEMS: Final[msgspec.json.Decoder[list[Item]]] = msgspec.json.Decoder(list[Item])
_OUTPUT: Final = msgspec.json.Decoder(_Output)


def encode_stored(stored: StoredResponse) -> bytes:
    """Return a `KeptResponse` in MessagePack."""
    response = stored.response
    kept = KeptResponse(
        response.id,
        response.status,
        response.background,
        response.previous_response_id,
        encode_in_parts(response),
        encode_in_parts(stored.input),
    )
    return msgspec.msgpack.encode(kept)


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    last_use_s: float


class ResponseStore:
    """Responses by id, encoded, so that the bound in bytes is one on memory. A large one is encoded in a thread."""

    def __init__(self, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """The one that was used last at the end."""
        self._num_bytes = 0
        self._encoding: dict[str, asyncio.Task[None]] = {}
        self._open: set[str] = set()
        """Responses in progress that no client has removed. They stay here if they are dropped for lack of room or use."""

    def __len__(self) -> int:
        return len(self._entries)

    def is_open(self, response_id: str) -> bool:
        """Return whether the last state that was put is in progress, and not removed since."""
        return response_id in self._open

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, stored: StoredResponse) -> None:
        """Store a state in place of an earlier one, and drop others if needed. One larger than the store is not stored.

        `get` returns a large one after `settle`.
        """
        response_id = stored.response.id
        self.remove(response_id)
        if stored.response.status == "in_progress":
            self._open.add(response_id)
        if is_large(stored):
            self._encoding[response_id] = asyncio.create_task(self._encode(stored))
        else:
            self._add(response_id, encode_stored(stored))

    async def settle(self, response_id: str) -> None:
        """Wait until the last state that was put is encoded."""
        while (task := self._encoding.get(response_id)) is not None:
            await asyncio.wait({task})

    async def _encode(self, stored: StoredResponse) -> None:
        response_id, task = stored.response.id, asyncio.current_task()
        data = None
        try:
            data = await asyncio.to_thread(encode_stored, stored)
        finally:
            if self._encoding.get(response_id) is task:  # no later state was put, and it was not removed
                del self._encoding[response_id]
                if data is not None:
                    self._add(response_id, data)

    def _add(self, response_id: str, data: bytes) -> None:
        if len(data) > self._config.max_stored_bytes:
            return
        self._entries[response_id] = _Entry(data, self._clock())
        self._num_bytes += len(data)
        while self._num_bytes > self._config.max_stored_bytes or len(self) > self._config.max_stored_responses:
            self._num_bytes -= len(self._entries.popitem(last=False)[1].data)

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
        self._open.discard(response_id)
        task = self._encoding.pop(response_id, None)
        entry = self._entries.pop(response_id, None)
        self._num_bytes -= 0 if entry is None else len(entry.data)
        return entry is not None or task is not None

    def _forget_old(self) -> None:
        oldest_use_s = self._clock() - self._config.response_ttl
        while self._entries and next(iter(self._entries.values())).last_use_s < oldest_use_s:
            self._num_bytes -= len(self._entries.popitem(last=False)[1].data)
