"""The messages of the process that checks grammars, as MessagePack. A job is a Grammar."""

from __future__ import annotations

from typing import Final

import msgspec

from jaxserve.config import StructuredConfig

MODULE = "jaxserve.structured.check_process"
OVERLAPPING_ONE_OF: Final = (
    "oneOf is supported if no value can match two of its schemas: write anyOf, or remove it and check the reply"
)
"""The reason why a schema is rejected."""


class CheckSpec(msgspec.Struct, frozen=True):
    """Everything the process needs to start."""

    model_path: str
    config: StructuredConfig


class CheckReply(msgspec.Struct, frozen=True):
    """The result of a check."""

    error: str | None
    """The reason why the grammar is rejected; None: it is valid."""
    lark: str | None = None
    """The grammar in Lark's form if it was sent in llama.cpp's."""
    matcher_bytes: int = 0
    """Memory of its matcher and first mask."""
