"""The messages of the process that checks grammars: one line of JSON each."""

from __future__ import annotations

import msgspec

from jaxserve.config import StructuredConfig
from jaxserve.ipc.messages import Grammar

MODULE = "jaxserve.structured.check_process"


class CheckSpec(msgspec.Struct, frozen=True):
    """The first line: everything the process needs to start."""

    model_path: str
    config: StructuredConfig


class CheckRequest(msgspec.Struct, frozen=True):
    """A grammar to be checked."""

    number: int
    grammar: Grammar


class CheckReply(msgspec.Struct, frozen=True):
    """The result of a check. Replies come in the order in which checks end."""

    number: int
    error: str | None
    """The reason why the grammar is rejected; None: it is valid."""
    lark: str | None = None
    """The grammar in Lark's form if it was sent in llama.cpp's."""
