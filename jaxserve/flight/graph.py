"""Captured objects as plain data, and back.

A graph is a list of nodes; a value is a number, a text, bytes, or `Reference` to a node. Bytes are hashes of pages: they are
replaced by other names, so that a file does not let a reader check guesses of a prompt.

Reading creates objects of the scheduler's packages only, and sets their attributes; it calls nothing of theirs.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from jaxserve.flight.capture import OWNED, CapturedChain, CapturedObject
from jaxserve.flight.errors import RecordError

_MAKERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


class Node(msgspec.Struct, frozen=True, array_like=True):
    """A container, an array, a request's page hashes or an object."""

    kind: str
    items: list[Any] = []
    """Elements; of a dict, its keys and values in turn; of an object, the values of its attributes."""
    names: list[str] = []
    """The class of an object, then its attributes; the type of an array, then its sizes."""


class _Writer:
    def __init__(self, rename: Callable[[bytes], bytes]) -> None:
        self._rename = rename
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []
        self.nodes: list[Node | None] = []

    def value(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return self._rename(value)
        if isinstance(value, np.generic):
            return value.item()
        if (place := self._places.get(id(value))) is None:
            place = self._places[id(value)] = len(self.nodes)
            self._alive.append(value)  # so that no other object gets its id
            self.nodes.append(None)
            self.nodes[place] = self._node(value)
        return [place]

    def _node(self, value: Any) -> Node:
        if isinstance(value, np.ndarray):
            return Node("array", value.ravel().tolist(), [value.dtype.name, *map(str, value.shape)])
        if isinstance(value, CapturedChain):
            return Node("chain", [value.index])
        if isinstance(value, CapturedObject):
            held = value.attributes
            return Node("object", [self.value(item) for item in held.values()], [value.name, *held])
        if isinstance(value, dict):
            kind = "ordered" if isinstance(value, OrderedDict) else "dict"
            return Node(kind, [self.value(part) for item in value.items() for part in item])
        return Node(type(value).__name__, [self.value(item) for item in value])


def write_graph(root: CapturedObject, rename: Callable[[bytes], bytes]) -> list[Node]:
    """Return the nodes of a captured scheduler, which is the first."""
    writer = _Writer(rename)
    writer.value(root)
    return [node for node in writer.nodes if node is not None]


T = TypeVar("T")


class GraphReader:
    """Builds the objects of a graph, or sets the attributes of objects that exist."""

    def __init__(self, nodes: Sequence[Node], chain: Callable[[int], Any]) -> None:
        """chain: returns the page hashes with this index."""
        self._nodes = nodes
        self._chain = chain
        self._made: dict[int, Any] = {}
        self.objects: list[Any] = []
        """Objects of the scheduler's packages that were created."""

    def restore(self, target: object) -> None:
        """Set the attributes of `target`, and of the objects that it owns, to those of the first node. Raises RecordError."""
        try:
            self._fill(target, 0)
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise RecordError(f"its state cannot be read: {error!r}") from error

    def _fill(self, target: Any, place: int) -> None:
        node = self._nodes[place]
        self._made[place] = target
        for name, item in zip(node.names[1:], node.items, strict=True):
            live = getattr(target, name, None)
            if isinstance(item, list) and self._is_state_of(live, item[0]):
                if item[0] not in self._made:
                    self._fill(live, item[0])
            else:
                object.__setattr__(target, name, self._value(item))

    def _is_state_of(self, live: object, place: int) -> bool:
        node = self._nodes[place]
        return node.kind == "object" and node.names[0] == f"{type(live).__module__}:{type(live).__qualname__}"

    def _value(self, item: Any) -> Any:
        if not isinstance(item, list):
            return item
        place = item[0]
        if place not in self._made:
            self._made[place] = self._make(place)
        return self._made[place]

    def _make(self, place: int) -> Any:
        node = self._nodes[place]
        match node.kind:
            case "array":
                return np.array(node.items, node.names[0]).reshape([int(size) for size in node.names[1:]])
            case "chain":
                return self._chain(node.items[0])
            case "dict" | "ordered":
                parts = [self._value(item) for item in node.items]
                pairs = zip(parts[::2], parts[1::2], strict=True)
                return dict(pairs) if node.kind == "dict" else OrderedDict(pairs)
            case "object":
                made: Any = object.__new__(_class_named(node.names[0]))
                self.objects.append(made)
                self._fill(made, place)
                return made
        return _MAKERS[node.kind](self._value(item) for item in node.items)


def _class_named(name: str) -> type:
    """Return a class of the scheduler's packages. Raises RecordError."""
    module, _, qualname = name.partition(":")
    found = getattr(importlib.import_module(module), qualname, None) if module.startswith(OWNED) else None
    if not isinstance(found, type) or found.__module__ != module:
        raise RecordError(f"it has an object of an unknown class, {name!r}")
    return found
