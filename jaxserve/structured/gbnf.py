"""Converts grammars in llama.cpp's format (GBNF) to Lark's, which llguidance reads.

A GBNF grammar has no lexer: a text fits if any division of it does. Lark's lexer takes the longest terminal that fits, so that
`[a-z ]+ " is "` would match nothing. `gbnf_terminals` chooses terminals that keep the language: a small grammar without recursion
is a single one, a regular expression. All other terminals are single characters, and alternatives that begin alike share their
beginning: each alternative that could come next is an item of the parser, whose number is limited.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Final

from jaxserve.structured.gbnf_rules import (
    Class,
    Group,
    Literal,
    Part,
    Reference,
    identity,
    is_nullable,
    nullable_rules,
    read_rules,
)
from jaxserve.structured.gbnf_terminals import choose_terminals

_MAX_TERMINAL_CHARS: Final = 10_000
"""Characters of a terminal, with each repetition written out: its lexer has states for each of them."""
_FREQUENT: Final = 4
_FREQUENT_CHARS: Final = 30
"""Rules of more characters, with so many references, are terminals of their own: with a copy in each part, such as a string
in each property of an object, the choice would take long, and so would masks."""
_SOME_TEXT: Final = "/(?s:.+)/"


def gbnf_to_lark(text: str, *, has_terminals: bool = True) -> str:
    """Return the grammar in Lark's format. Raises ValueError for one that cannot be read.

    has_terminals: False for terminals of single characters only.
    """
    rules = read_rules(text)
    graph, new = dict[str, list[str]](), ["root"]
    while new:
        name = new.pop()
        if name not in rules:
            raise ValueError(f"rule '{name}' not found")
        if name not in graph:
            graph[name] = list(_references(rules[name]))
            new += graph[name]
    if not rules["root"].alternatives:
        return 'start: ""\n'
    rules = {name: _with_beginnings(rules[name]) for name in graph}
    return _Writer(rules, _terminals(rules, graph) if has_terminals else ()).grammar()


def _with_beginnings(group: Group) -> Group:
    """Return a group of the same texts in which a sequence without its last part is a part: a terminal if the whole is none.

    The space after a string, for example, belongs to no terminal if it may be a part of what follows.
    """
    alternatives = []
    for sequence in group.alternatives:
        parts = [_with_beginnings(part) if isinstance(part, Group) else part for part in sequence]
        alternatives.append(parts if len(parts) < 3 else [Group([parts[:-1]]), parts[-1]])
    return Group(alternatives, group.least, group.most)


def _terminals(rules: dict[str, Group], graph: Mapping[str, list[str]]) -> Collection[Hashable]:
    """Return the identities of the parts to make terminals: the whole grammar if it is small and has no recursion."""
    sizes = _sizes(rules, graph)

    def is_small(part: Part) -> bool:
        size = _num_chars(part, sizes)
        return size is not None and size <= _MAX_TERMINAL_CHARS

    if is_small(rules["root"]):
        return [rules["root"]]
    uses = Counter(chain.from_iterable(graph.values()))
    frequent = {name for name, size in sizes.items() if uses[name] >= _FREQUENT and size > _FREQUENT_CHARS}
    for name in sizes:  # those that it refers to come before it
        if not frequent.isdisjoint(graph[name]) and uses[name] < 2:
            frequent.add(name)
    several = {rules[name] for name in sizes if uses[name] > 1}

    @cache
    def may_be_terminal(part: Part) -> bool:
        has_parts = isinstance(part, Group) and part not in several and not frequent.isdisjoint(_references(part))
        return is_small(part) and not has_parts

    return choose_terminals(rules, may_be_terminal)


def _references(group: Group) -> Iterator[str]:
    for part in chain(*group.alternatives):
        if isinstance(part, Reference):
            yield part.name
        elif isinstance(part, Group):
            yield from _references(part)


def _sizes(rules: Mapping[str, Group], graph: Mapping[str, list[str]]) -> dict[str, int]:
    """Return the number of characters of rules without recursion, with each reference and repetition written out."""
    sizes, sorter = dict[str, int](), TopologicalSorter(graph)
    with suppress(CycleError):
        sorter.prepare()
    while names := sorter.get_ready():  # none of those whose references lead to a cycle
        for name in names:
            sizes[name] = _num_chars(rules[name], sizes) or 0
        sorter.done(*names)
    return sizes


def _num_chars(part: Part, sizes: Mapping[str, int]) -> int | None:
    """Return None for a part with recursion."""
    match part:
        case Class():
            return 1
        case Literal(text):
            return len(text)
        case Reference(name):
            return sizes.get(name)
    found = 0
    for inner in chain(*part.alternatives):
        size = _num_chars(inner, sizes)
        if size is None:
            return None
        found += size
    return part.num_copies * found


class _Writer:
    """Writes a grammar in Lark's format."""

    def __init__(self, rules: dict[str, Group], terminals: Collection[Hashable]) -> None:
        self._rules = rules
        self._nullable_rules = nullable_rules(rules)
        self._terminals = terminals
        self._names: dict[str | Group, str] = {}
        """The names of rules in Lark's format, and of terminals by their groups."""
        self._new: list[str | Group] = []

    def grammar(self) -> str:
        lines = [f"start: {self._term(Reference('root'))}\n"]
        while self._new:
            key = self._new.pop()
            text = self._alternatives(self._rules[key]) if isinstance(key, str) else self._text(key)
            lines.append(f"{self._names[key]}: {text}\n")
        return "".join(lines)

    def _name(self, key: str | Group) -> str:
        if key not in self._names:
            self._names[key] = f"{'r' if isinstance(key, str) else 'R'}{len(self._names)}"  # terminals are in capitals
            self._new.append(key)
        return self._names[key]

    def _term(self, part: Class | Reference | Group) -> str:
        """Return a part of a rule."""
        if isinstance(part, Class):
            return part.pattern
        group = self._rules[part.name] if isinstance(part, Reference) else part
        if group in self._terminals:
            return self._optional(group)
        if isinstance(part, Reference):
            return self._name(part.name) + ("?" if group.least == 0 else "")
        return f"({self._alternatives(part)}){_count(part.least, part.most)}"

    def _alternatives(self, group: Group) -> str:
        """Return the alternatives of a group that is no terminal."""

        return _factored([self._terms(sequence) for sequence in group.alternatives])

    def _terms(self, sequence: list[Part]) -> list[str]:
        found: list[str] = []
        for part in sequence:
            if isinstance(part, Literal):
                is_terminal = identity(part) in self._terminals
                found += [json.dumps(part.text)] if is_terminal else map(json.dumps, part.text)
            elif isinstance(part, Group) and part not in self._terminals and _is_sequence(part):
                found += self._terms(part.alternatives[0])
            else:
                found.append(self._term(part))
        return found

    def _text(self, group: Group) -> str:
        """Return the regular expression of a terminal. One that may be empty is optional where it is used instead."""
        if not self._is_nullable(group):
            return self._repeated(group, group.least)
        if any(all(map(self._is_nullable, sequence)) for sequence in group.alternatives):
            return f"({self._repeated(group, group.least)}) & {_SOME_TEXT}"
        return self._repeated(group, 1)

    def _inner(self, part: Part) -> str:
        """Return a part of a terminal. llguidance 1.9 panics at `"aé" | "a" "é"`, and not at single characters."""
        match part:
            case Class(pattern):
                return pattern
            case Literal(text):
                return " ".join(map(json.dumps, text))
            case Reference(name):
                return self._optional(self._rules[name])
        return self._repeated(part, part.least)

    def _optional(self, terminal: Group) -> str:
        return self._name(terminal) + ("?" if self._is_nullable(terminal) else "")

    def _repeated(self, group: Group, least: int) -> str:
        text = " | ".join(" ".join(map(self._inner, sequence)) for sequence in group.alternatives)
        return f"({text}){_count(least, group.most)}"

    def _is_nullable(self, part: Part) -> bool:
        return is_nullable(part, self._nullable_rules)


def _is_sequence(group: Group) -> bool:
    return len(group.alternatives) == group.least == group.most == 1


def _count(least: int, most: int | None) -> str:
    if most is None:
        return "*+"[least] if least < 2 else f"{{{least},}}"
    if most == 1:
        return "" if least else "?"
    return f"{{{least},{most}}}"


def _factored(sequences: list[list[str]]) -> str:
    """Return alternatives of which no two begin with the same term."""
    groups = dict[str, list[list[str]]]()
    for sequence in sequences:
        groups.setdefault(sequence[0] if sequence else '""', []).append(sequence)
    return " | ".join(map(_with_shared_start, groups.values()))


def _with_shared_start(sequences: list[list[str]]) -> str:
    """Return alternatives that begin with the same term."""
    first = sequences[0]
    if all(sequence == first for sequence in sequences):
        return " ".join(first or ['""'])
    columns = enumerate(zip(*sequences, strict=False))
    length = next((i for i, terms in columns if len(set(terms)) > 1), min(map(len, sequences)))
    return f"{' '.join(first[:length])} ({_factored([sequence[length:] for sequence in sequences])})"
