"""Compiles a request's grammar to llguidance's matcher, both for checks and for masks, on the model's vocabulary."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from jaxserve.config import StructuredConfig
from jaxserve.ipc.call_grammar import ANY_TEXT, CallGrammar, without
from jaxserve.ipc.messages import Grammar, Thinking
from jaxserve.structured.calls import call_parts, suffix
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer


class Vocabulary:
    """A tokenizer as `LLTokenizer` needs it. Control tokens and end tokens have no text, so no text of a grammar has them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.max_token_id + 1)]
        self.special_token_ids = sorted(tokenizer.control_tokens.ids.union(tokenizer.eos_token_ids))
        self.eos_token_id = tokenizer.eos_token_id or 0
        self.bos_token_id = tokenizer.bos_token_id
        special = set(self.special_token_ids)
        self._ids = {data: i for i, data in reversed(list(enumerate(self.tokens))) if data and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes) -> list[int]:
        """Return tokens whose bytes are `data`: the tokenizer's if they are exact, otherwise the longest that fit.

        Called for jump-forward text. The tokenizer may add a leading space, or encode a control token.
        """
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return self._longest_tokens(data)
        is_exact = (
            all(self._ids.get(self.tokens[i]) == i for i in ids) and b"".join(self.tokens[i] for i in ids) == data
        )
        return ids if is_exact else self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        found: list[int] = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


def ll_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    """Return the vocabulary for llguidance; takes about a fifth of a second for 50,000 tokens."""
    vocabulary = Vocabulary(tokenizer)
    eos = list(tokenizer.eos_token_ids) or [vocabulary.eos_token_id]
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=eos)


def load_ll_tokenizer(model_path: Path) -> LLTokenizer:
    """Return the vocabulary of a checkpoint. Raises CheckpointError in one line."""
    return ll_tokenizer(load_tokenizer(model_path))


_JSON_OPTIONS: Final[dict[str, Any]] = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
"""Compact JSON, since weak models emit spaces until they reach the limit. Unenforceable schemas are rejected."""
_MAX_ITEMS: Final = 500
"""Parser items per position of the text: the cost of ambiguous grammars grows cubically beyond."""
_MAX_STEP_ITEMS: Final = 10_000
"""Parser items per step: about thirty milliseconds."""
_MAX_JSON_ITEMS: Final = 6_000
"""Parser items per position where brackets and tags tell what a text is: four for an optional property, two for one outside JSON."""
_MAX_JSON_STEP_ITEMS: Final = 50_000
"""Parser items per step for such grammars: 20 ms for a thousand optional properties."""
_STEP_FUEL: Final = 5_000_000
"""Work of the lexer per step: a tenth of a second, as for `masks`. A count that divides a text in many ways needs most."""
_TOO_MANY_ITEMS: Final = re.compile(r"(?<=Current row has )\d+ items; max is \d+|(?<=Too many items \()limit \d+")


class GrammarError(ValueError):
    """The grammar cannot be followed; the text says why."""


def matcher_error(matcher: LLMatcher) -> GrammarError:
    """Return the error at which a matcher stopped, in words of its own for limits of the parser."""
    text = matcher.get_error()
    found = _TOO_MANY_ITEMS.search(text)
    return GrammarError(text if found is None else f"too many of its alternatives may come next ({found[0]})")


def source_of(grammar: Grammar) -> str:
    """Return the grammar in llguidance's format. Raises GrammarError for a schema that is no JSON object."""
    try:
        parts = _parts(grammar)
    except ValueError as error:
        raise GrammarError(str(error)) from error
    if grammar.thinking is not None:
        answer, *others = parts
        parts = [_with_thinking(grammar.thinking), answer | {"name": "answer"}, *others]
    return json.dumps({"grammars": parts})


def new_matcher(grammar: Grammar, tokenizer: LLTokenizer, config: StructuredConfig) -> LLMatcher:
    """Return a matcher at the start of `grammar`. Raises GrammarError for one that is invalid or too large."""
    is_json = grammar.kind in ("json_schema", "calls")
    limits = LLParserLimits(
        max_items_in_row=_MAX_JSON_ITEMS if is_json else _MAX_ITEMS,
        step_max_items=_MAX_JSON_STEP_ITEMS if is_json else _MAX_STEP_ITEMS,
        step_lexer_fuel=_STEP_FUEL,
        max_lexer_states=config.max_grammar_states,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=limits)
    if matcher.is_error():
        raise matcher_error(matcher)
    if warnings := matcher.get_grammar_warnings():  # about what it ignores
        raise GrammarError("; ".join(warnings))
    return matcher


def _parts(grammar: Grammar) -> list[dict[str, Any]]:
    """Return grammars of which the first refers to the others by name."""
    match grammar.kind:
        case "json_schema":
            source = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type]
            return list(json.loads(source)["grammars"])
        case "regex":
            return list(json.loads(LLMatcher.grammar_from_regex(grammar.text))["grammars"])
        case "lark":
            return [{"lark_grammar": grammar.text}]
    return call_parts(msgspec.json.decode(grammar.text, type=CallGrammar), _schema_part)


def _schema_part(schema: str) -> dict[str, Any]:
    (part,) = _parts(Grammar("json_schema", schema))
    return part


def _terms(parts: Sequence[str | int]) -> str:
    return " ".join(f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts)


def _with_thinking(thinking: Thinking) -> dict[str, Any]:
    """Return the grammar of reasoning up to and with its end, optional space, then the grammar "answer"."""
    opener = "" if thinking.is_open else _terms(thinking.opener)
    _, *rest = thinking.closer
    start = "start: thinking answer" if thinking.is_open else "start: thinking answer | answer"
    if rest:  # a message, of which there may be several
        start = "start: thinking* answer"
    lark = f"""{start}
thinking: {opener} {_thoughts(thinking)}
space: /[ \\n]{{1,2}}/
answer: {_terms(thinking.answer_begin)} @answer
"""
    return {"name": "main", "lark_grammar": lark}


def _thoughts(thinking: Thinking) -> str:
    """Return the end of the rule for thinking, and the rule for its text."""
    closer, *rest = thinking.closer
    following = _terms(rest) or "space?"
    text = f"{ANY_TEXT} & {without(closer)}" if isinstance(closer, str) else ANY_TEXT
    if thinking.budget is not None:
        # Text that exceeds the budget would continue after the rule; so the end is a token that the text cannot contain.
        return f"thoughts <[{thinking.budget.closer}]> {following}\nthoughts[max_tokens={thinking.budget.max_tokens}]: {text}"
    if isinstance(closer, str):
        return f"thoughts {following}\nthoughts{suffix(closer)}: {ANY_TEXT}"
    return f"thoughts <[{closer}]> {following}\nthoughts: {ANY_TEXT}"
