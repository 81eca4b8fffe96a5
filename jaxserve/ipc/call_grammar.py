"""The grammar of a reply with tool calls: terms in sequence, which `jaxserve.structured.calls` compiles."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

ANY_TEXT: Final = "/(?s:.*)/"
"""The terminal of all texts, in Lark's format."""

Terminals = tuple[str | int, ...]
"""Text, and control tokens by their ids."""


class Json(msgspec.Struct, frozen=True, array_like=True, tag="json"):
    """A value in JSON."""

    schema: dict[str, Any]


class Text(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """A text without quotes."""

    pattern: str
    """The texts, as a terminal in Lark's format."""
    end: str = ""
    """The text that ends it where it first occurs. Empty: what follows is no part of any of the texts."""


class Either(msgspec.Struct, frozen=True, array_like=True, tag="either"):
    """One of several sequences."""

    options: tuple[Terms, ...]


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A member of `Members`."""

    terms: Terms
    count: Literal["one", "optional", "any"] = "one"


class Members(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """Members in their order, of which some may be absent."""

    members: tuple[Member, ...]
    separator: Terms = ()
    """Stands between two members that are present."""


Term = str | int | Json | Text | Either | Members
"""Text, a control token by its id, or a part with a choice."""
Terms = tuple[Term, ...]


class CallGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A reply that consists of at least one call, or of text with calls in it."""

    begin: Terminals
    """Precedes the calls."""
    calls: tuple[Terms, ...]
    """A call of each function."""
    separator: Terminals | None
    """Stands between two calls; None: there is exactly one call."""
    end: Terminals
    """Follows the calls."""
    allows_text: bool = False
    """True if the reply may be any text, with calls after the first part of each `begin`."""
    is_bare: bool = False
    """True if no marker announces calls: the reply is text or calls."""
    excludes_brackets: bool = False
    """True if text does not begin with a bracket, since a parser may take such text for calls."""
    reasoning: str = ""
    """The start of the model's reasoning. Text must not begin with it, since `Thinking` covers it."""
    other_starts: tuple[str, ...] = ()
    """Further texts that a parser takes for the start of a call: text does not contain them."""
    text_begin: Terminals = ()
    """Precedes the text, or the answer, of a reply without calls."""
    answer: str = ""
    """A JSON schema as JSON: a reply without calls has it. Empty: the text of a reply is free, if it is allowed at all."""


def pattern_of(text: str) -> str:
    """Return the regular expression of one text, for use between slashes."""
    return re.escape(text).replace("\n", "n").replace("/", r"\/")


def without(mark: str) -> str:
    """Return the terminal of texts that do not contain `mark`."""
    return f"~/(?s:.*){pattern_of(mark)}(?s:.*)/"
