"""The operator's commands to the engine, until they are answered."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from jaxserve.errors import RateLimitError, RequestError
from jaxserve.frontend.errors import request_error
from jaxserve.ipc.messages import Command, CommandDone, CommandName, CommandOptions, EngineState

MAX_COMMANDS: Final = 64
"""Commands that the engine has not answered, beyond which none is sent."""


class Commands:
    """Running commands. Each ends once."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._ends: dict[int, asyncio.Future[EngineState]] = {}

    def new(self, name: CommandName, options: CommandOptions) -> tuple[Command, asyncio.Future[EngineState]]:
        """Return a command to send, and its end, which raises RequestError if the engine rejects it.

        Raises RateLimitError if too many are not answered, those of callers that have left among them.
        """
        if len(self._ends) >= MAX_COMMANDS:
            raise RateLimitError(f"The engine has not answered {MAX_COMMANDS} commands. Please retry later.")
        command = Command(next(self._ids), name, options)
        self._ends[command.command_id] = asyncio.get_running_loop().create_future()
        return command, self._ends[command.command_id]

    def end(self, message: CommandDone) -> None:
        """End the command that the engine answered."""
        future = self._ends.pop(message.command_id, None)
        if future is None or future.done():  # its caller was cancelled
            return
        if message.error is None:
            future.set_result(message.state)
        else:
            future.set_exception(request_error(message.error))

    def fail(self, error: RequestError) -> None:
        """End all running commands with `error`."""
        ends, self._ends = self._ends, {}
        for future in ends.values():
            if not future.done():
                future.set_exception(error)
