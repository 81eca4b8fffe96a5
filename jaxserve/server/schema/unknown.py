"""Fields inside the objects of a request that nobody knows: the decoder passes over them, and they are to be named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.inspect import CollectionType, Metadata, StructType, Type, UnionType

from jaxserve.server.schema.unsupported import NO_OPS

_MAX_ITEMS = 256
"""So many items of a list are looked at: naming fields must not take longer than decoding them."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that ask for nothing; clients send replies back with such."""


def unknown_inside(struct: type[msgspec.Struct], fields: Mapping[str, msgspec.Raw]) -> Iterator[str]:
    """Paths of unknown fields below the top level of a body that `struct` has decoded."""
    for name, kind in _nesting(struct).items():
        if name in fields:
            yield from _unknown(kind, msgspec.json.decode(fields[name]), name)


@cache
def _nesting(struct: type[msgspec.Struct]) -> Mapping[str, Type]:
    """The fields that may hold structs, as they are spelled in JSON."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, StructType), "a struct's type is one"
    return MappingProxyType({field.encode_name: field.type for field in info.fields if _may_hold_struct(field.type)})


def _may_hold_struct(kind: Type) -> bool:
    if isinstance(kind, UnionType):
        return any(map(_may_hold_struct, kind.types))
    if isinstance(kind, Metadata):
        return _may_hold_struct(kind.type)
    return isinstance(kind, StructType) or (isinstance(kind, CollectionType) and _may_hold_struct(kind.item_type))


def _unknown(kind: Type, value: Any, place: str) -> Iterator[str]:
    if isinstance(kind, Metadata):
        yield from _unknown(kind.type, value, place)
    elif isinstance(kind, UnionType):
        for member in kind.types:
            if _is_meant(member, value):
                yield from _unknown(member, value, place)
    elif isinstance(kind, CollectionType) and isinstance(value, list):
        for i, item in enumerate(itertools.islice(value, _MAX_ITEMS)):
            yield from _unknown(kind.item_type, item, f"{place}[{i}]")
    elif isinstance(kind, StructType) and isinstance(value, dict):
        yield from _unknown_of(kind, value, place)


def _unknown_of(kind: StructType, value: dict[str, Any], place: str) -> Iterator[str]:
    nesting = _nesting(kind.cls)
    for name, child in value.items():
        if name in nesting:
            yield from _unknown(nesting[name], child, f"{place}.{name}")
        elif (
            name not in kind.cls.__struct_encode_fields__
            and name != kind.tag_field
            and name not in NO_OPS
            and child not in _NOTHING
        ):
            yield f"{place}.{name}"


def _is_meant(member: Type, value: Any) -> bool:
    """Whether a member of a union decoded the value: structs are told apart by their tags."""
    if isinstance(member, StructType):
        return isinstance(value, dict) and (member.tag_field is None or value.get(member.tag_field) == member.tag)
    return isinstance(member, Metadata | CollectionType)
