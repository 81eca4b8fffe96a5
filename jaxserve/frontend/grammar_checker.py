"""Checks the grammars of requests in a separate process.

The first grammar starts the process, which takes about a second. If the process dies, the next grammar starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
from collections import OrderedDict
from typing import Final

import msgspec

from jaxserve.config import StructuredConfig
from jaxserve.errors import UnavailableError, invalid
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.protocol import MODULE, CheckReply, CheckRequest, CheckSpec

_log = logging.getLogger(__name__)

_MAX_CHECKS: Final = 8
"""Largest number of concurrent checks."""
_MAX_KEPT_BYTES: Final = 8 << 20
"""Largest total size of the grammars whose check is remembered."""


class GrammarChecker:
    """Grammar checks of one API process. `aclose` ends the checking process."""

    def __init__(self, config: StructuredConfig) -> None:
        self.config = config
        self._model_path: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(_MAX_CHECKS)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[CheckReply]] = {}
        self._fine: OrderedDict[Grammar, Grammar] = OrderedDict()
        """Valid grammars, and what the engine reads, least recently used first."""
        self._num_kept_bytes = 0

    def install(self, model_path: str) -> None:
        """Set the model; called once, when its path is known."""
        self._model_path = model_path

    async def check(self, grammar: Grammar, param: str) -> Grammar:
        """Return the grammar as the engine reads it: llama.cpp's format becomes Lark's.

        Raises InvalidRequestError naming `param` if the grammar is invalid or too large.
        """
        num_bytes = len(grammar.text.encode())
        if num_bytes > self.config.max_grammar_size:
            raise invalid(param, f"at most {self.config.max_grammar_size} bytes (--max-grammar-size), got {num_bytes}")
        if grammar in self._fine:
            self._fine.move_to_end(grammar)
            return self._fine[grammar]
        async with self._turns:
            reply = await self._ask(grammar)
        if reply.error is not None:
            raise invalid(param, f"{reply.error.rstrip('.')}")
        checked = grammar if reply.lark is None else msgspec.structs.replace(grammar, kind="lark", text=reply.lark)
        self._remember(grammar, checked)
        return checked

    async def aclose(self) -> None:
        """End the process."""
        if self._reading is not None:  # first, so that the end of the process is not logged as an error
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _ask(self, grammar: Grammar) -> CheckReply:
        number = next(self._numbers)
        verdict: asyncio.Future[CheckReply] = asyncio.get_running_loop().create_future()
        try:
            process = await self._running_process()
            self._waiting[number] = verdict
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(CheckRequest(number, grammar)) + b"\n")
            await process.stdin.drain()
            return await verdict
        except (BrokenPipeError, ConnectionResetError):
            raise _gone() from None
        finally:
            self._waiting.pop(number, None)

    async def _running_process(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                if self._model_path is None:
                    raise UnavailableError("The model is loading.")
                pipe = asyncio.subprocess.PIPE
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", MODULE, stdin=pipe, stdout=pipe, start_new_session=True, limit=1 << 20
                )
                assert self._process.stdin is not None
                self._process.stdin.write(msgspec.json.encode(CheckSpec(self._model_path, self.config)) + b"\n")
                self._waiting = {}
                self._reading = asyncio.create_task(self._read(self._process, self._waiting))
            return self._process

    async def _read(self, process: asyncio.subprocess.Process, waiting: dict[int, asyncio.Future[CheckReply]]) -> None:
        """Deliver results until the process ends, then fail the checks that are still `waiting`."""
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                reply = msgspec.json.decode(line, type=CheckReply)
                verdict = waiting.pop(reply.number, None)
                if verdict is not None and not verdict.done():
                    verdict.set_result(reply)
            _log.error("the process that checks grammars ended with %s", await process.wait())
        finally:
            for verdict in waiting.values():
                if not verdict.done():
                    verdict.set_exception(_gone())

    def _remember(self, grammar: Grammar, checked: Grammar) -> None:
        if grammar not in self._fine:  # another request may have asked meanwhile
            self._fine[grammar] = checked
            self._num_kept_bytes += _size(grammar, checked)
        while self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= _size(*self._fine.popitem(last=False))


def _size(*grammars: Grammar) -> int:
    """Return the bytes of grammars."""
    return sum(len(grammar.text.encode()) for grammar in grammars)


def _gone() -> UnavailableError:
    return UnavailableError("The process that checks grammars ended. Please retry.")
