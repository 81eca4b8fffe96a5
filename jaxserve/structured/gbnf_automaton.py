"""Automata of the terminals of a GBNF grammar, all run together as llguidance's lexer does; used by `gbnf_terminals`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, TypeAlias

from jaxserve.structured.gbnf_rules import ALL_BYTES, Class, Group, Literal, Part, Reference, byte_range, first_byte

_MAX_VISITS: Final = 700_000
"""Visits for one grammar: less than a second."""


End: TypeAlias = tuple[frozenset[int], frozenset[tuple[int, int]]]
"""Terminals that end with the same text, and each terminal that may go on, with the bytes of its next character."""


class TooCostlyError(Exception):
    """The automata have too many states."""


class Budget:
    """The work that the choice of a grammar's terminals may take."""

    def __init__(self) -> None:
        self._num_visits = 0

    def visit(self) -> None:
        """Count a visit. Raises TooCostlyError."""
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise TooCostlyError


class Automaton:
    """Nodes of which each is followed by one character, or by other nodes, or is the end of a terminal.

    Characters that begin with the same byte count as one, and counts as any number of times.
    """

    def __init__(self, rules: Mapping[str, Group], budget: Budget) -> None:
        self._rules = rules
        self._visit = budget.visit
        self._first_bytes: list[int] = []
        """The character after a node: a bit for each byte with which it may begin; 0 for none."""
        self._next: list[list[int]] = []
        self._terminal_of: list[int] = []
        self._ends: set[int] = set()
        self._starts: list[frozenset[int]] = []
        """The nodes at which each terminal begins."""
        self.begins: list[int] = []
        """The bytes with which each terminal may begin."""
        self.is_nullable: list[bool] = []
        self._after: dict[frozenset[int], list[frozenset[int]]] = {}
        self._ends_of: dict[frozenset[int], Collection[End]] = {}

    def add(self, part: Part) -> int:
        """Add a terminal and return its number."""
        number = len(self._starts)
        start = self._new(number)
        end = self._add_part(part, start, number)
        self._ends.add(end)
        found = self._reached([start])
        self.is_nullable.append(end in found)
        self._starts.append(found - {end})
        begins = 0
        for node in found:
            begins |= self._first_bytes[node]
        self.begins.append(begins)
        return number

    def ends_of(self, terminals: frozenset[int]) -> Collection[End]:
        """Return the ways in which one of some terminals ends that all begin at the same place."""
        if terminals not in self._ends_of:
            found, known = set[End](), set[frozenset[int]]()
            new = [frozenset[int]().union(*(self._starts[terminal] for terminal in terminals))]
            while new:
                for state in self._steps(new.pop()):
                    if state not in known:
                        known.add(state)
                        new.append(state)
                        if ended := state & self._ends:
                            found.add((frozenset(self._terminal_of[node] for node in ended), self._going_on(state)))
            self._ends_of[terminals] = found
        return self._ends_of[terminals]

    def _going_on(self, state: Iterable[int]) -> frozenset[tuple[int, int]]:
        """Return terminals and bytes of their next character."""
        found: dict[int, int] = {}
        for node in state:
            if self._first_bytes[node]:
                terminal = self._terminal_of[node]
                found[terminal] = found.get(terminal, 0) | self._first_bytes[node]
        return frozenset(found.items())

    def _steps(self, state: frozenset[int]) -> list[frozenset[int]]:
        """Return the states after one more character."""
        if state not in self._after:
            blocks: list[tuple[int, list[int]]] = [(ALL_BYTES, [])]
            for node in state:
                if first_bytes := self._first_bytes[node]:
                    blocks = list(self._divided(blocks, first_bytes, self._next[node]))
            self._after[state] = [self._reached(nodes) for _, nodes in blocks if nodes]
        return self._after[state]

    def _divided(
        self, blocks: list[tuple[int, list[int]]], first_bytes: int, after: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the nodes after each set of bytes, with those `after` some of them."""
        for block, nodes in blocks:
            self._visit()
            if both := block & first_bytes:
                yield both, nodes + after
            if rest := block & ~first_bytes:
                yield rest, nodes

    def _new(self, terminal: int, first_bytes: int = 0) -> int:
        self._visit()
        self._first_bytes.append(first_bytes)
        self._next.append([])
        self._terminal_of.append(terminal)
        return len(self._next) - 1

    def _reached(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the nodes before a character, and ends, that are reached without a character."""
        found, new = set[int](), list(nodes)
        while new:
            node = new.pop()
            if node not in found:
                self._visit()
                found.add(node)
                new += () if self._first_bytes[node] else self._next[node]
        return frozenset(node for node in found if self._first_bytes[node] or node in self._ends)

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
