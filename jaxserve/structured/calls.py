"""Compiles the grammar of a reply with tool calls to Lark's format, with one grammar for each schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jaxserve.ipc.call_grammar import (
    ANY_TEXT,
    CallGrammar,
    Either,
    Json,
    Members,
    Term,
    Text,
    pattern_of,
    without,
)

Part = dict[str, Any]
"""A grammar of llguidance. The first of several refers to the others by name."""


def call_parts(calls: CallGrammar, json_part: Callable[[str], Part]) -> list[Part]:
    """Return the grammar of a reply and one for each schema, so that the references of each find its root.

    json_part: returns the grammar of a JSON schema, given as JSON.
    """
    rules = _Rules()
    one = " | ".join(rules.sequence(call) for call in calls.calls)
    more = "" if calls.separator is None else f"({rules.sequence(calls.separator)} call)*"
    rules.lines += [f"calls: call {more} {rules.sequence(calls.end)}", f"call: {one}", *_around(calls, rules)]
    parts = [{"lark_grammar": "\n".join(rules.lines) + "\n"}]
    parts += [json_part(schema) | {"name": name} for schema, name in rules.schemas.items()]
    return parts if not calls.answer else [*parts, json_part(calls.answer) | {"name": "object"}]


class _Rules:
    """Rules and schemas that terms refer to by name. Terms that are equal share them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.schemas: dict[str, str] = {}
        """The name of each schema."""
        self._texts: dict[Text, str] = {}
        self._num_members = 0

    def sequence(self, terms: Iterable[Term]) -> str:
        """Return terms one after the other as an expression."""
        return " ".join(map(self._term, terms)) or '""'

    def _term(self, term: Term) -> str:
        match term:
            case int():
                return f"<[{term}]>"
            case str():
                return json.dumps(term)
            case Json():
                return "@" + self.schemas.setdefault(json.dumps(term.schema), f"arguments{len(self.schemas)}")
            case Text():
                return self._text(term)
            case Either():
                return f"({' | '.join(map(self.sequence, term.options))})"
            case Members():
                return self._members(term)

    def _text(self, text: Text) -> str:
        if text not in self._texts:
            name = self._texts[text] = f"text{len(self._texts)}" if text.end else f"TEXT{len(self._texts)}"
            self.lines.append(f"{name}{suffix(text.end)}: {text.pattern}")
        return self._texts[text]

    def _members(self, term: Members) -> str:
        """Return the rule for all members: each has one for itself and those after it, first or after a separator."""
        name, separator = f"members{self._num_members}", self.sequence(term.separator)
        self._num_members += 1
        self.lines += [f'{name}_first_{len(term.members)}: ""', f'{name}_more_{len(term.members)}: ""']
        for i, member in enumerate(term.members):
            one, first, more = self.sequence(member.terms), f"{name}_first_{i}", f"{name}_more_{i}"
            next_first, next_more = f"{name}_first_{i + 1}", f"{name}_more_{i + 1}"
            repeated = f"({separator} {one})"
            match member.count:
                case "one":
                    self.lines += [f"{first}: {one} {next_more}", f"{more}: {repeated} {next_more}"]
                case "optional":
                    self.lines += [f"{first}: {one} {next_more} | {next_first}", f"{more}: {repeated}? {next_more}"]
                case "any":
                    self.lines += [
                        f"{first}: {one} {repeated}* {next_more} | {next_first}",
                        f"{more}: {repeated}* {next_more}",
                    ]
        return f"{name}_first_0"


def _around(calls: CallGrammar, rules: _Rules) -> list[str]:
    """Return the rules for the reply as a whole."""
    begin, text_begin = rules.sequence(calls.begin), rules.sequence(calls.text_begin)
    if calls.answer:
        return [f"start: {begin} calls | {text_begin} @object"]
    if not calls.allows_text:
        return [f"start: {begin} calls"]
    excluded = rf" & ~/\s*{pattern_of(calls.reasoning)}(?s:.*)/" if calls.reasoning else ""
    excluded += "".join(f" & {without(start)}" for start in calls.other_starts)
    excluded += r" & ~/\s*[\[{](?s:.*)/" if calls.excludes_brackets else ""
    if calls.is_bare:
        return [f"start: {begin} calls | {text_begin} TEXT", f"TEXT: {ANY_TEXT}{excluded}"]
    mark, *rest = calls.begin
    begin = rules.sequence(rest)
    if isinstance(mark, int):
        return [f"start: TEXT (<[{mark}]> {begin} calls TEXT)*", f"TEXT: {ANY_TEXT}{excluded}"]
    return [
        f"start: (lead {begin} calls)* TEXT",
        f"lead{suffix(mark)}: {ANY_TEXT}{excluded}",
        f"TEXT: {ANY_TEXT} & {without(mark)}{excluded}",
    ]


def suffix(end: str) -> str:
    """Return the attribute of a rule for a text that ends with `end` where it first occurs; none if it is empty."""
    return f"[suffix={json.dumps(end)}]" if end else ""
