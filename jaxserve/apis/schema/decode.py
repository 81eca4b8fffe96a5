"""From the bytes of a body to a checked request struct.

Everything wrong with the JSON or its types ends in one InvalidRequestError with the path as `param`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
from msgspec.inspect import AnyType, CollectionType, IntType, ListType, Metadata, StructType, Type, UnionType

from jaxserve.apis.schema.large_bodies import (
    ShortenedBody,
    check_utf8,
    count_values,
    decode_numbers,
    half_a_pair,
    shorten_texts,
)
from jaxserve.apis.schema.unsupported import ADVICE, INSTEAD, NO_OPS, UNSUPPORTED, is_neutral
from jaxserve.errors import InvalidRequestError
from jaxserve.frontend.checks import MAX_ECHOED_CHARS, invalid_field, refuse

T = TypeVar("T", bound=msgspec.Struct)

MAX_BYTES_ON_LOOP: Final = 32 << 10
"""Larger bodies are decoded, checked and translated in threads."""
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_request(struct: type[T], body: bytes, max_values: int | None = None) -> tuple[T, list[str]]:
    """Decode and check `body`; return it with the paths of unknown fields, which are ignored.

    max_values: the number of values that it may have, besides those in lists of token ids. None: no limit.
    Raises InvalidRequestError for malformed JSON, too many values, wrong types and missing fields, and
    UnsupportedParameterError for a known field that asks for something this server does not do.
    """
    short = ShortenedBody(body)
    try:
        if len(body) > MAX_BYTES_ON_LOOP:
            check_utf8(body)
            short = shorten_texts(body)
        else:
            body.decode()  # raises for what is not UTF-8
        num_surplus = 0 if max_values is None else _num_surplus(short.body, max_values)
        fields = _FIELDS.decode(short.body)
        lists = _number_lists(struct, fields, 0 if num_surplus else _LARGE_BYTES)
        if max_values is not None and num_surplus:
            numbers = sum(count_values(bytes(fields[name]), max_values).all for name in lists)
            if num_surplus > numbers:
                raise _too_many_values(max_values)
        request = _decoded_beside(struct, fields, lists) if lists else _decoded(struct, short.body)
        if short.texts:
            short.restored(request)
        for name, numbers_of_field in lists.items():
            setattr(request, name, numbers_of_field)
        unknown = [*_unknown_fields(struct, fields), *unknown_inside(struct, fields)]
        return request, [short.worded(name, MAX_ECHOED_CHARS) for name in unknown]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body is not valid UTF-8 at byte {error.start}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise invalid_field(short.worded(str(error), MAX_ECHOED_CHARS + 1), struct=struct) from None
    except msgspec.DecodeError as error:
        message = "it is empty" if not body.strip() else half_a_pair(body) or short.worded(str(error), MAX_ECHOED_CHARS)
        raise InvalidRequestError(f"The body is not valid JSON: {message}.", code="invalid_json") from None


def _decoded(struct: type[T], body: bytes) -> T:
    """Decode a body. Numbers such as 16.0 pass for integers, as JSON Schema and most clients see them."""
    try:
        return msgspec.json.decode(body, type=struct)
    except msgspec.ValidationError as error:
        if "`float`" not in str(error):
            raise
        return msgspec.json.decode(msgspec.json.encode(_with_integers(msgspec.json.decode(body))), type=struct)


def may_exceed(num_bytes: int, most: int) -> bool:
    """Return True if a text of this length may have more than `most` values: each takes a byte and a separator."""
    return num_bytes > 2 * most


def _num_surplus(body: bytes, most: int) -> int:
    """Return the number of values beyond `most`. Raises InvalidRequestError for as many lists, objects or keys."""
    if not may_exceed(len(body), most):
        return 0
    counts = count_values(body, most)
    if counts.exceed(most):
        raise _too_many_values(most)
    return max(0, counts.all - most)


def _too_many_values(most: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body has more than {most} values (--max-body-values), not counting the numbers in lists of token ids.",
        code="too_many_values",
    )


def _number_lists(
    struct: type[msgspec.Struct], fields: Mapping[str, msgspec.Raw], num_bytes: int
) -> dict[str, list[Any]]:
    """Return the lists of numbers of more than `num_bytes` among the fields of a body, decoded in parts."""
    lists: dict[str, list[Any]] = {}
    for name, integers in _shape(struct).number_lists.items():
        raw = bytes(fields.get(name, b""))
        if len(raw) > num_bytes and (numbers := decode_numbers(raw, integers=integers)) is not None:
            lists[name] = numbers
    return lists


def _decoded_beside(struct: type[T], fields: Mapping[str, msgspec.Raw], lists: Mapping[str, list[Any]]) -> T:
    """Decode a body with short lists in place of `lists`. Raises as the decoder does."""
    rest = {name: _SHORT_LIST if name in lists else raw for name, raw in fields.items()}
    return _decoded(struct, msgspec.json.encode(rest))


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_integers(child) for name, child in value.items()}
    if isinstance(value, list):
        return [_with_integers(child) for child in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _MAX_EXACT
    return int(value) if is_whole else value


_LARGE_BYTES = 256 << 10
"""Lists of numbers that are longer are decoded in parts."""
_SHORT_LIST = msgspec.Raw(b"[0]")
_MAX_EXACT = 2**53
"""Floats below hold every integer exactly."""


def _unknown_fields(struct: type[msgspec.Struct], fields: dict[str, msgspec.Raw]) -> list[str]:
    unknown = []
    for name, raw in fields.items():
        if name in struct.__struct_encode_fields__ or name in NO_OPS:
            continue
        if name not in UNSUPPORTED:
            unknown.append(name)
        elif not is_neutral(name, msgspec.json.decode(raw)):
            instead = INSTEAD.get(name)
            is_field = instead in struct.__struct_encode_fields__
            raise refuse(name, advice=f"use `{instead}`" if is_field else ADVICE.get(name))
    return unknown


_MAX_ITEMS = 256
"""Number of items of a list that are examined: naming fields must not take longer than decoding them."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values that ask for nothing; clients send replies back with them."""


def unknown_inside(struct: type[msgspec.Struct], fields: Mapping[str, msgspec.Raw]) -> list[str]:
    """Return the paths of unknown fields below the top level of a body that `struct` has decoded."""
    found: list[str] = []
    for name, kind in _shape(struct).nesting.items():
        if name in fields:
            _look(kind, msgspec.json.decode(fields[name]), name, found)
    return found


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of a struct."""

    known: frozenset[str]
    """Known names, also those of the hints that are ignored."""
    nesting: Mapping[str, Type]
    """Fields that may hold structs, by their names in JSON."""
    number_lists: Mapping[str, bool]
    """Fields that take lists of token ids. True: the decoder accepts integers only; False: it does not look at the items."""


@cache
def _shape(struct: type[msgspec.Struct]) -> _Shape:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, StructType), "a struct's type is one"
    names = {field.encode_name: field.type for field in info.fields}
    known = frozenset(names) | NO_OPS | ({info.tag_field} if info.tag_field is not None else set())
    nesting = {name: kind for name, kind in names.items() if _may_hold_struct(kind)}
    numbers = {name: items for name, kind in names.items() if (items := _number_items(kind)) is not None}
    own = {name: items is IntType for name, items in numbers.items() if name in struct.__struct_fields__}
    return _Shape(known, MappingProxyType(nesting), MappingProxyType(own))


def _number_items(kind: Type) -> type[AnyType] | type[IntType] | None:
    """Return the type of the items of a list of anything or of integers; None for fields that take no such list."""
    if isinstance(kind, UnionType):
        return next((found for member in kind.types if (found := _number_items(member)) is not None), None)
    if isinstance(kind, Metadata):
        return _number_items(kind.type)
    items = kind.item_type if isinstance(kind, ListType) else None
    return next((one for one in (AnyType, IntType) if isinstance(items, one)), None)


def _may_hold_struct(kind: Type) -> bool:
    if isinstance(kind, UnionType):
        return any(map(_may_hold_struct, kind.types))
    if isinstance(kind, Metadata):
        return _may_hold_struct(kind.type)
    return isinstance(kind, StructType) or (isinstance(kind, CollectionType) and _may_hold_struct(kind.item_type))


def _look(kind: Type, value: Any, place: str, found: list[str]) -> None:
    if isinstance(kind, Metadata):
        _look(kind.type, value, place, found)
    elif isinstance(kind, UnionType):
        for member in kind.types:
            if _is_meant(member, value):
                _look(member, value, place, found)
    elif isinstance(kind, CollectionType) and isinstance(value, list):
        for i, item in enumerate(value[:_MAX_ITEMS]):
            _look(kind.item_type, item, f"{place}[{i}]", found)
    elif isinstance(kind, StructType) and isinstance(value, dict):
        shape = _shape(kind.cls)
        for name, child in value.items():
            if name not in shape.known:
                if child not in _NOTHING:
                    found.append(f"{place}.{name}")
            elif isinstance(child, dict | list) and name in shape.nesting:
                _look(shape.nesting[name], child, f"{place}.{name}", found)


def _is_meant(member: Type, value: Any) -> bool:
    """Return True if this member of a union decoded the value: tags distinguish structs."""
    if isinstance(member, StructType):
        return isinstance(value, dict) and (member.tag_field is None or value.get(member.tag_field) == member.tag)
    return isinstance(member, Metadata | CollectionType)
