"""The stored responses of a server: each is stored by the API process that made it.

An id contains the number of its process; questions about a peer's responses go there, over the sockets between API
processes. It ends with `--response-id-suffix`, which tells servers apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final

import msgspec

from jaxserve.apis.responses.store import KeptResponse, ResponseStore
from jaxserve.config import ResponsesConfig
from jaxserve.frontend.peers import PeerProcesses

RESPONSE_ID: Final = re.compile(r"resp_([0-9a-f]{3})[0-9a-f]{32}([0-9a-z]{0,32})")
"""Process and server of a response."""
_ANSWER: Final[msgspec.msgpack.Decoder[KeptResponse | None]] = msgspec.msgpack.Decoder(KeptResponse | None)
_NONE: Final = msgspec.msgpack.encode(None)


class ResponseService:
    """Stores the responses made here, runs background responses, and asks the peers for theirs."""

    def __init__(self, config: ResponsesConfig, peers: PeerProcesses) -> None:
        share = dataclasses.replace(
            config,
            max_stored_responses=peers.share_of(config.max_stored_responses),
            max_stored_bytes=peers.share_of(config.max_stored_bytes),
        )
        self.store = ResponseStore(share)
        self._peers = peers
        self._suffix = config.response_id_suffix
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._own: dict[str, Callable[[str], Awaitable[bytes]]] = {
            "get": self._get,
            "cancel": self._cancel,
            "delete": self._delete,
        }

    def new_id(self) -> str:
        """Return an id for a response that is made here."""
        return f"resp_{self._peers.index:03x}{uuid.uuid4().hex}{self._suffix}"

    async def get(
        self, response_id: str, reserve: Callable[[int], None] = lambda num_bytes: None
    ) -> KeptResponse | None:
        """Return the response; None if no process stores it. Counts as a use. reserve: takes its bytes before it is decoded."""
        return await self._ask("get", response_id, reserve)

    async def cancel(self, response_id: str) -> KeptResponse | None:
        """Cancel a background response; return its last state."""
        return await self._ask("cancel", response_id)

    async def delete(self, response_id: str) -> KeptResponse | None:
        """Delete a response and end its run; return its last state."""
        return await self._ask("delete", response_id)

    def run(self, response_id: str, work: Coroutine[Any, Any, None], at_end: Callable[[bool], None]) -> None:
        """Run the work of a response in the background. `at_end` gets True if it was cancelled."""
        task = asyncio.create_task(work)
        self._runs[response_id] = task

        def end(task: asyncio.Task[None]) -> None:
            del self._runs[response_id]
            at_end(task.cancelled())

        task.add_done_callback(end)

    async def aclose(self) -> None:
        """End all runs."""
        for response_id in list(self._runs):
            await self._cancel(response_id)

    @property
    def answers(self) -> Mapping[str, Callable[[str], Awaitable[bytes]]]:
        """Answers to the questions of the other processes, by topic."""
        return {f"response.{name}": own for name, own in self._own.items()}

    async def _ask(
        self, what: str, response_id: str, reserve: Callable[[int], None] = lambda num_bytes: None
    ) -> KeptResponse | None:
        match = RESPONSE_ID.fullmatch(response_id)
        if match is None or match[2] != self._suffix or (index := int(match[1], 16)) >= self._peers.count:
            return None
        if index == self._peers.index:
            data = await self._own[what](response_id)
        else:
            data = await self._peers.ask(index, f"response.{what}", response_id)
        reserve(len(data))
        return _ANSWER.decode(data)

    async def _get(self, response_id: str) -> bytes:
        await self.store.settle(response_id)
        return self.store.get(response_id) or _NONE

    async def _cancel(self, response_id: str) -> bytes:
        run = self._runs.get(response_id)
        if run is not None:
            run.cancel()
            await asyncio.wait({run})
        return await self._get(response_id)

    async def _delete(self, response_id: str) -> bytes:
        data = await self._cancel(response_id)
        self.store.remove(response_id)
        return data
