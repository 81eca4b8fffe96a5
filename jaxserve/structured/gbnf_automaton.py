"""Automata of the terminals of a GBNF grammar, all run together as llguidance's lexer does; used by `gbnf_terminals`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from jaxserve.structured.gbnf_rules import ALL_BYTES, Class, Group, Literal, Part, Reference, byte_range, first_byte

_MAX_VISITS: Final = 500_000
"""Nodes that may be visited for one division of a grammar: about half a second."""


class TooCostlyError(Exception):
    """The automata have too many states."""


class Automaton:
    """Nodes of which each is followed by one character, or by other nodes, or is the end of a terminal.

    Characters that begin with the same byte count as one, and counts as any number of times.
    """

    def __init__(self, rules: Mapping[str, Group]) -> None:
        self._rules = rules
        self.first_bytes: list[int] = []
        """The character after a node: a bit for each byte with which it may begin; 0 for none."""
        self._next: list[list[int]] = []
        self.terminal_of: list[int] = []
        self.ends: set[int] = set()
        self.starts: list[frozenset[int]] = []
        """The nodes at which each terminal begins."""
        self.is_nullable: list[bool] = []
        self._num_visits = 0

    def add(self, part: Part) -> int:
        """Add a terminal and return its number."""
        number = len(self.starts)
        start = self._new(number)
        end = self._add_part(part, start, number)
        self.ends.add(end)
        found = self._reached([start])
        self.is_nullable.append(end in found)
        self.starts.append(found - {end})
        return number

    def steps(self, state: Iterable[int]) -> Iterator[frozenset[int]]:
        """Return the states after one more character."""
        blocks: list[tuple[int, list[int]]] = [(ALL_BYTES, [])]
        for node in state:
            first_bytes = self.first_bytes[node]
            if not first_bytes:
                continue
            new = list[tuple[int, list[int]]]()
            for block, nodes in blocks:
                self.visit()
                if both := block & first_bytes:
                    new.append((both, [*nodes, *self._next[node]]))
                if rest := block & ~first_bytes:
                    new.append((rest, nodes))
            blocks = new
        return (self._reached(nodes) for _, nodes in blocks if nodes)

    def visit(self) -> None:
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise TooCostlyError

    def _new(self, terminal: int, first_bytes: int = 0) -> int:
        self.visit()
        self.first_bytes.append(first_bytes)
        self._next.append([])
        self.terminal_of.append(terminal)
        return len(self._next) - 1

    def _reached(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the nodes before a character, and ends, that are reached without a character."""
        found, new = set[int](), list(nodes)
        while new:
            node = new.pop()
            if node not in found:
                self.visit()
                found.add(node)
                new += () if self.first_bytes[node] else self._next[node]
        return frozenset(node for node in found if self.first_bytes[node] or node in self.ends)

    def _add_part(self, part: Part, start: int, terminal: int) -> int:
        """Return the node after a part that begins after the node `start`."""
        match part:
            case Class(_, first_bytes):
                return self._add_char(first_bytes, start, terminal)
            case Literal(text):
                for char in text:
                    start = self._add_char(byte_range(first_byte(char), first_byte(char)), start, terminal)
                return start
            case Reference(name):
                return self._add_part(self._rules[name], start, terminal)
        first, last = self._new(terminal), self._new(terminal)
        self._next[start].append(first)
        for sequence in part.alternatives:
            node = self._new(terminal)
            self._next[first].append(node)
            for inner in sequence:
                node = self._add_part(inner, node, terminal)
            self._next[node].append(last)
        if part.most != 1:
            self._next[last].append(first)
        if part.least == 0:
            self._next[first].append(last)
        after = self._new(terminal)
        self._next[last].append(after)
        return after

    def _add_char(self, first_bytes: int, start: int, terminal: int) -> int:
        before, after = self._new(terminal, first_bytes or ALL_BYTES), self._new(terminal)
        self._next[start].append(before)
        self._next[before].append(after)
        return after
