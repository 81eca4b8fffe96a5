"""The words that a field of a request may have: what an error names where another one was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import msgspec
from msgspec.inspect import CollectionType, DictType, LiteralType, Metadata, StructType, Type, UnionType

_STEP: Final = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


@cache
def choices_at(struct: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """The words for the field at `path`, such as `messages[...].role`; none where it is not made of words."""
    kinds: list[Type] = [msgspec.inspect.type_info(struct)]
    for step in _STEP.findall(path):
        kinds = [below for kind in kinds for member in _members(kind) for below in _below(member, step)]
    literals = [member for kind in kinds for member in _members(kind) if isinstance(member, LiteralType)]
    return tuple(str(value) for literal in literals for value in literal.values)


def _members(kind: Type) -> Iterator[Type]:
    """The types that a value may have, one by one."""
    if isinstance(kind, Metadata):
        yield from _members(kind.type)
    elif isinstance(kind, UnionType):
        for member in kind.types:
            yield from _members(member)
    else:
        yield kind


def _below(kind: Type, step: str) -> Iterator[Type]:
    """The types of a field, or of an item."""
    if isinstance(kind, StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
    elif step.startswith("[") and isinstance(kind, CollectionType):
        yield kind.item_type
    elif step.startswith("[") and isinstance(kind, DictType):
        yield kind.value_type
