"""What whoever runs the server asks of the engine, until it is answered."""

from __future__ import annotations

import asyncio
import itertools

from jaxserve.errors import RequestError
from jaxserve.frontend.errors import request_error
from jaxserve.ipc.messages import Command, CommandDone, CommandName


class Commands:
    """Commands under way. Each ends once."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._ends: dict[int, asyncio.Future[None]] = {}

    def new(self, name: CommandName) -> tuple[Command, asyncio.Future[None]]:
        """A command to send, and its end, which raises RequestError where the engine refuses."""
        command = Command(next(self._ids), name)
        self._ends[command.command_id] = asyncio.get_running_loop().create_future()
        return command, self._ends[command.command_id]

    def end(self, message: CommandDone) -> None:
        """The engine answered."""
        future = self._ends.pop(message.command_id, None)
        if future is None or future.done():  # nobody waits any more
            return
        if message.error is None:
            future.set_result(None)
        else:
            future.set_exception(request_error(message.error))

    def fail(self, error: RequestError) -> None:
        """There is nobody to answer: all under way end with `error`."""
        ends, self._ends = self._ends, {}
        for future in ends.values():
            if not future.done():
                future.set_exception(error)
