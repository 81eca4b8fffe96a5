"""Chooses the parts of a GBNF grammar that become terminals; called by `gbnf`.

Masks of a grammar with long terminals are quick, but llguidance's lexer takes the longest text that fits a terminal, while GBNF
allows every division of a text. A part becomes a terminal if the lexer divides each text where the grammar does: where its text
ends, no terminal that may begin at the same place goes on with a character that may follow the part. This is decided by upper
bounds: those of `Automaton`, and what may follow a rule anywhere in the grammar may follow it everywhere. A part for which
it is not sure is divided into its own parts, down to single characters, which no text can go beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from jaxserve.structured.gbnf_automaton import Automaton, Budget, TooCostlyError
from jaxserve.structured.gbnf_rules import Class, Group, Literal, Part, Reference, identity

_MAX_LITERALS: Final = 100
"""Largest number of alternatives whose literals may be terminals: the beginnings that characters share are one parser item."""


def choose_terminals(rules: Mapping[str, Group], may_be_terminal: Callable[[Part], bool]) -> frozenset[Hashable]:
    """Return the identities of the parts to make terminals, as large as possible.

    A part is a group, a literal, or the body of a rule, in place of each reference to it outside of other terminals.
    may_be_terminal: returns True for some of the parts without recursion.
    """
    divided = set[Hashable]()

    def is_allowed(part: Part) -> bool:
        return identity(part) not in divided and may_be_terminal(part)

    budget = Budget()
    try:
        division = _Division(rules, is_allowed, budget)
        while wrong := division.wrong_terminals():
            divided |= wrong
            division = _Division(rules, is_allowed, budget)
    except (TooCostlyError, RecursionError):
        return frozenset()
    return frozenset(division.terminals)


@dataclass(eq=False)
class _Choice:
    """A group that is no terminal."""

    sequences: list[list[_Item]]
    can_repeat: bool
    is_optional: bool


_Item: TypeAlias = "int | str | _Choice"
"""The number of a terminal's occurrence, the name of a rule or a group."""


class _Division:
    """A grammar divided into terminals, of which the same one may occur in several places.

    Occurrences have numbers. A set of them is an integer with a bit for each.
    """

    def __init__(self, rules: Mapping[str, Group], is_allowed: Callable[[Part], bool], budget: Budget) -> None:
        self._rules = rules
        self._is_allowed = is_allowed
        self._visit = budget.visit
        self._automaton = Automaton(rules, budget)
        self._terminals: dict[Hashable, int] = {}
        """The numbers of terminals in the automaton, by their identity."""
        self._terminal_of: list[int] = []
        """The terminal of each occurrence."""
        self._begins: dict[int, int] = {}
        self._choices: dict[str, _Choice] = {}
        new = ["root"]
        while new:
            name = new.pop()
            if name not in self._choices:
                self._choices[name] = self._choice(rules[name], new)
        self._first = dict.fromkeys(self._choices, (0, False))
        self._follow = dict.fromkeys(self._choices, 0)
        self._after = [0] * len(self._terminal_of)

    @property
    def terminals(self) -> Collection[Hashable]:
        """The identities of the terminals."""
        return self._terminals.keys()

    def wrong_terminals(self) -> set[Hashable]:
        """Return terminals that may go on where another one, or themselves, has to end."""
        self._find_first()
        self._find_following()
        identities = list(self._terminals)
        return {identities[terminal] for terminal in self._going_on()}

    def _choice(self, group: Group, names: list[str]) -> _Choice:
        """Return a group divided into terminals, and add the names of its rules to `names`."""
        has_literals = len(group.alternatives) <= _MAX_LITERALS
        sequences = [
            [item for part in sequence for item in self._items(part, names, has_literals)]
            for sequence in group.alternatives
        ]
        return _Choice(sequences, group.most != 1, group.least == 0)

    def _items(self, part: Part, names: list[str], has_literals: bool) -> list[_Item]:
        whole = self._rules[part.name] if isinstance(part, Reference) else part
        if isinstance(part, Class) or (self._is_allowed(whole) and (has_literals or not isinstance(part, Literal))):
            return [self._number(whole)]
        match part:
            case Literal(text):
                return [self._number(Literal(char)) for char in text]
            case Reference(name):
                names.append(name)
                return [name]
        return [self._choice(part, names)]

    def _number(self, part: Part) -> int:
        """Return the number of a new occurrence of a terminal."""
        key = identity(part)
        if key not in self._terminals:
            self._terminals[key] = self._automaton.add(part)
        self._terminal_of.append(self._terminals[key])
        return len(self._terminal_of) - 1

    def _find_first(self) -> None:
        """Find the occurrences that may come first in each rule, and which rules may be empty."""
        before = None
        while before != self._first:
            before = dict(self._first)
            for name in reversed(self._choices):  # references before what they are in, mostly
                self._first[name] = self._first_of(self._choices[name])

    def _first_of(self, item: _Item) -> tuple[int, bool]:
        self._visit()
        if isinstance(item, int):
            return 1 << item, self._automaton.is_nullable[self._terminal_of[item]]
        if isinstance(item, str):
            return self._first[item]
        found, is_nullable = 0, item.is_optional
        for sequence in item.sequences:
            for inner in sequence:
                first, may_be_empty = self._first_of(inner)
                found |= first
                if not may_be_empty:
                    break
            else:
                is_nullable = True
        return found, is_nullable

    def _find_following(self) -> None:
        """Find the occurrences that may come after each occurrence and each rule."""
        before = None
        while before != (self._follow, self._after):
            before = dict(self._follow), list(self._after)
            for name, choice in self._choices.items():
                self._follow_with(choice, self._follow[name])

    def _follow_with(self, item: _Item, following: int) -> None:
        if isinstance(item, int):
            self._after[item] |= following
        elif isinstance(item, str):
            self._follow[item] |= following
        else:
            if item.can_repeat:
                following |= self._first_of(item)[0]
            for sequence in item.sequences:
                after = following
                for inner in reversed(sequence):
                    self._follow_with(inner, after)
                    first, may_be_empty = self._first_of(inner)
                    after = first | (after if may_be_empty else 0)

    def _going_on(self) -> Iterator[int]:
        """Run the lexer from each set of occurrences that may come next."""
        new, known = [self._first["root"][0]], set[int]()
        while new:
            allowed = new.pop()
            if allowed in known:
                continue
            known.add(allowed)
            after: dict[int, int] = {}
            for number in _numbers(allowed):
                self._visit()
                terminal = self._terminal_of[number]
                after[terminal] = after.get(terminal, 0) | self._after[number]
            for ended, going_on in self._automaton.ends_of(frozenset(after)):
                following = 0
                for terminal in ended:
                    following |= after[terminal]
                new.append(following)
                first_bytes = self._first_bytes(following)
                yield from (terminal for terminal, next_bytes in going_on if next_bytes & first_bytes)

    def _first_bytes(self, occurrences: int) -> int:
        """Return the bytes with which the terminals may begin."""
        if occurrences not in self._begins:
            found = 0
            for number in _numbers(occurrences):
                self._visit()
                found |= self._automaton.begins[self._terminal_of[number]]
            self._begins[occurrences] = found
        return self._begins[occurrences]


def _numbers(occurrences: int) -> Iterator[int]:
    digits = f"{occurrences:b}"[::-1]
    number = digits.find("1")
    while number >= 0:
        yield number
        number = digits.find("1", number + 1)
