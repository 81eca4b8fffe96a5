"""How the replies to one request are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from jaxserve.errors import UnsupportedParameterError
from jaxserve.ipc.messages import Grammar, Spelled, Thinking
from jaxserve.server.parsers.bodies import Tools
from jaxserve.server.parsers.dialect import Dialect
from jaxserve.server.parsers.parser import OutputParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyReading:
    """The model's dialect, and what the request and its prompt say of the reply. Without arguments: plain text."""

    dialect: Dialect = field(default_factory=Dialect)
    tools: Tools = field(default_factory=dict)
    """Functions that may be called."""
    prompt_end: str = ""
    continued: str | None = None
    """The message that the reply continues."""
    shown_token_ids: frozenset[int] = frozenset()
    """Control tokens that a parser has to see."""
    max_calls: int | None = None
    """A reply ends with so many calls; None: it may make any number."""

    def behind_thinking(self, grammar: Grammar, param: str, spelled: Callable[[str], Spelled]) -> Grammar:
        """The grammar, beginning where the model's reasoning ends. Raises UnsupportedParameterError.

        spelled: tells text from control tokens.
        """
        if self.continued is not None:
            raise _unsupported(param, "for the rest of a message (continue_final_message)")
        reasoning = self.dialect.reasoning
        if self.dialect.has_channels:
            raise _unsupported(param, "with this model's format of reasoning (--reasoning-parser none)")
        if reasoning is None:
            return grammar
        begun = reasoning.primer(self.prompt_end)
        if begun.endswith(reasoning.closer):
            return grammar
        thinking = Thinking(spelled(reasoning.opener), spelled(reasoning.closer), is_open=bool(begun))
        return msgspec.structs.replace(grammar, thinking=thinking)

    def new_parser(self) -> OutputParser | None:
        """A parser for one choice; None when its text is its content."""
        return self.dialect.parser(self.tools, self.prompt_end, self.continued)


def _unsupported(param: str, where: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(f"Unsupported parameter: '{param}' is not supported {where}.", param=param)
