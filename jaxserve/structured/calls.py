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
        """Return the rule for all members: one rule for each place, with what may follow there.

        A separator precedes the choice of the next member, so a place costs the parser few items for each member.
        """
        name, size = f"members{self._num_members}", len(term.members)
        self._num_members += 1
        if not size:
            return '""'
        separator = self.sequence(term.separator)
        is_empty = [all(member.count != "one" for member in term.members[i:]) for i in range(size)]
        more = [f"{name}_more_{i}" for i in range(size)] + ['""']
        for i, member in enumerate(term.members):
            one, last = self.sequence(member.terms), i + 1 == size
            repeated = one if member.count != "any" else f"{one} ({separator} {one})*"
            others = "" if member.count == "one" or last else f" | {name}_{i + 1}"
            self.lines += [f"{name}_{i}: {repeated} {more[i + 1]}{others}"]
            self.lines += [f"{more[i]}: {separator} {name}_{i}" + (' | ""' if is_empty[i] else "")] if i else []
        return f"({name}_0)?" if is_empty[0] else f"{name}_0"


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
