"""Checks the grammars of requests in a separate process.

The first grammar starts the process, a fork server, which takes about a second.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from jaxserve.config import StructuredConfig
from jaxserve.errors import UnavailableError, invalid
from jaxserve.forkserver.client import ForkServerClient
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.protocol import MODULE, CheckReply, CheckSpec

_MAX_CHECKS: Final = 8
"""Largest number of concurrent checks."""
_MAX_KEPT_BYTES: Final = 8 << 20
"""Largest total size of the grammars whose check is remembered."""


class GrammarChecker:
    """Grammar checks of one API process. `aclose` ends the checking process."""

    def __init__(self, config: StructuredConfig) -> None:
        self.config = config
        self._model_path: str | None = None
        self._checks = ForkServerClient(
            MODULE, "checks grammars", max_jobs=_MAX_CHECKS, timeout_s=config.grammar_timeout
        )
        self._fine: OrderedDict[Grammar, Grammar] = OrderedDict()
        """Valid grammars, and what the engine reads, least recently used first."""
        self._num_kept_bytes = 0

    def install(self, model_path: str) -> None:
        """Set the model; called once, when its path is known."""
        self._model_path = model_path

    async def check(self, grammar: Grammar, param: str) -> Grammar:
        """Return the grammar as the engine reads it: llama.cpp's format becomes Lark's, and its matcher's memory is known.

        Raises InvalidRequestError naming `param` if the grammar is invalid or too large.
        """
        num_bytes = len(grammar.text.encode())
        if num_bytes > self.config.max_grammar_size:
            raise invalid(param, f"at most {self.config.max_grammar_size} bytes (--max-grammar-size), got {num_bytes}")
        if grammar in self._fine:
            self._fine.move_to_end(grammar)
            return self._fine[grammar]
        reply = await self._checks.ask(grammar, self._spec, CheckReply)
        if reply.error is not None:
            raise invalid(param, f"{reply.error.rstrip('.')}")
        checked = msgspec.structs.replace(grammar, matcher_bytes=reply.matcher_bytes)
        if reply.lark is not None:
            checked = msgspec.structs.replace(checked, kind="lark", text=reply.lark)
        self._remember(grammar, checked)
        return checked

    async def aclose(self) -> None:
        """End the process."""
        await self._checks.aclose()

    def _spec(self) -> CheckSpec:
        if self._model_path is None:
            raise UnavailableError("The model is loading.")
        return CheckSpec(self._model_path, self.config)

    def _remember(self, grammar: Grammar, checked: Grammar) -> None:
        if grammar not in self._fine:  # another request may have asked meanwhile
            self._fine[grammar] = checked
            self._num_kept_bytes += _size(grammar, checked)
        while self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= _size(*self._fine.popitem(last=False))


def _size(*grammars: Grammar) -> int:
    """Return the bytes of grammars."""
    return sum(len(grammar.text.encode()) for grammar in grammars)
