"""Checks grammars of requests: `python -m jaxserve.structured.check_process`, a fork server of an API process.

The child of a grammar builds its matcher and its first mask. A grammar whose check takes too much time or memory counts as
too costly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from llguidance import LLTokenizer

from jaxserve.config import StructuredConfig
from jaxserve.forkserver.serve import Service, serve
from jaxserve.ipc.messages import Grammar
from jaxserve.structured.compiling import GrammarError, load_ll_tokenizer, matcher_error, new_matcher
from jaxserve.structured.gbnf import gbnf_to_lark
from jaxserve.structured.memory import resident_bytes
from jaxserve.structured.protocol import OVERLAPPING_ONE_OF, CheckReply, CheckSpec

_MAX_ERROR_CHARS: Final = 500
_UNKNOWN_KEYS: Final = "Unimplemented keys:"
_NICENESS: Final = 10
_MEMORY_STEP: Final = 1 << 20
"""Memory is rounded up to this: two checks of one grammar should give the same."""
_MAX_CONVERTED_BYTES: Final = 1 << 19
"""Largest converted grammar, which crosses to the engine in place of the one that was sent."""


def converted(grammar: Grammar, *, has_terminals: bool = True) -> tuple[Grammar, str | None]:
    """Return a grammar in llama.cpp's format (GBNF) in Lark's, or why it cannot be read.

    has_terminals: False for terminals of single characters only.
    """
    try:
        text = gbnf_to_lark(grammar.text, has_terminals=has_terminals)
    except RecursionError:
        return grammar, "the GBNF grammar is nested too deeply"
    except ValueError as error:
        return grammar, f"the GBNF grammar cannot be read: {error}"[:_MAX_ERROR_CHARS]
    if len(text.encode()) > _MAX_CONVERTED_BYTES:
        return grammar, f"the GBNF grammar has more than {_MAX_CONVERTED_BYTES} bytes in Lark's form"
    return msgspec.structs.replace(grammar, kind="lark", text=text), None


def _check(grammar: Grammar, tokenizer: LLTokenizer, config: StructuredConfig) -> CheckReply:
    """Return why the grammar cannot be followed, or the memory of its matcher and its first mask."""
    before = resident_bytes()
    try:
        matcher = new_matcher(grammar, tokenizer, config)
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise matcher_error(matcher)
        if not any(mask) and not matcher.is_stopped():
            raise GrammarError("it allows no text at all")
    except GrammarError as error:
        return CheckReply(_reason(str(error)))
    num_steps = -(-max(0, resident_bytes() - before) // _MEMORY_STEP)
    return CheckReply(None, matcher_bytes=num_steps * _MEMORY_STEP)


def _reason(text: str) -> str:
    if "look-around" in text:
        return (
            "look-around such as (?=...) and (?!...) is not supported in patterns: remove the pattern and "
            "check the reply, or write it without"
        )
    if text.startswith(_UNKNOWN_KEYS):
        names = text.removeprefix(_UNKNOWN_KEYS).strip().strip("[]").replace('"', "")
        return f"not supported in schemas: {names}. Remove such keys and check the reply"[:_MAX_ERROR_CHARS]
    if "coerce_one_of" in text:
        return OVERLAPPING_ONE_OF
    if "Default retriever" in text:
        name = text.partition("'")[2].partition("'")[0].removeprefix("json-schema:///")
        return f"a $ref to another document, {name}, is not followed: put that schema into $defs"[:_MAX_ERROR_CHARS]
    if "NoExtensionBias" in text:
        return "it allows no text at all, for example because a `$ref` or a rule refers only to itself"
    return text.strip()[:_MAX_ERROR_CHARS] or "it is not valid"


def checked(grammar: Grammar, tokenizer: LLTokenizer, config: StructuredConfig) -> CheckReply:
    """Return the reply for a grammar, with Lark's form of one in llama.cpp's format."""
    if grammar.kind != "gbnf":
        return _check(grammar, tokenizer, config)
    replies = []
    for has_terminals in (True, False):  # the lexer may fail on a terminal whose characters the parser can follow
        lark, error = converted(grammar, has_terminals=has_terminals)
        reply = CheckReply(error) if error is not None else _check(lark, tokenizer, config)
        if reply.error is None:
            return msgspec.structs.replace(reply, lark=lark.text)
        replies.append(reply)
    return replies[0]


def unchecked(is_timeout: bool, config: StructuredConfig) -> CheckReply:
    """Return the reply for a grammar whose process was ended."""
    if is_timeout:
        return CheckReply(f"its check took more than {config.grammar_timeout:g} s of a processor (--grammar-timeout)")
    limit = f"{config.grammar_memory >> 20} MiB (--grammar-memory)"
    return CheckReply(f"its check failed: it needs more than {limit}, or is nested too deeply")


def load(spec: CheckSpec) -> Service[Grammar]:
    """Return the service. Raises CheckpointError."""
    config, tokenizer = spec.config, load_ll_tokenizer(Path(spec.model_path))
    return Service(
        Grammar,
        run=lambda grammar: checked(grammar, tokenizer, config),
        reply_without=lambda is_timeout: unchecked(is_timeout, config),
        timeout_s=config.grammar_timeout,
        memory=config.grammar_memory,
        niceness=_NICENESS,
    )


if __name__ == "__main__":
    serve(load, CheckSpec)
