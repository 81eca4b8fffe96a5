"""Checks of request fields, and the errors that name a field as its caller knows it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from reprlib import Repr
from types import MappingProxyType
from typing import Any, Final, get_type_hints

import msgspec
from msgspec.inspect import CollectionType, DictType, LiteralType, Metadata, StructType, Type, UnionType

from jaxserve.bounds import Bound
from jaxserve.config import LimitsConfig
from jaxserve.errors import InvalidRequestError, UnsupportedParameterError, invalid, unsupported

MAX_ECHOED_CHARS: Final = 200
"""Number of characters of the client's own input that an error message repeats."""
_BEGINNING: Final = Repr()
"""Writes the beginnings of long lists and objects."""
_BEGINNING.maxlist = _BEGINNING.maxtuple = _BEGINNING.maxdict = _BEGINNING.maxstring = _BEGINNING.maxother = (
    _BEGINNING.maxlong
) = MAX_ECHOED_CHARS + 1
_PATH = re.compile(r"^(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_WORD = re.compile(r"^Invalid (?:enum )?value '(?P<word>.*)'$", re.DOTALL)
_INDEX = re.compile(r"\[\d+\]")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")
_STEP: Final = re.compile(r"[^.\[\]]+|\[[^\]]*\]")


def shorten(value: object) -> str:
    """Return a client's value for an error text, cut after `MAX_ECHOED_CHARS` characters."""
    try:  # `repr` of megabytes takes 20 ms
        text = repr(value[: MAX_ECHOED_CHARS + 1]) if isinstance(value, str) else _BEGINNING.repr(value)
    except ValueError:
        return "a huge integer"
    return text if len(text) <= MAX_ECHOED_CHARS else text[:MAX_ECHOED_CHARS] + "..."


def missing(param: str) -> InvalidRequestError:
    """Return the error for a required field that is absent."""
    return InvalidRequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def refuse(name: str, value: object = None, *, advice: str | None = None) -> UnsupportedParameterError:
    """Return the error for a known field that this server does not honour, at all or with this value.

    advice: what to do in its place.
    """
    got = "is" if value is None else f"is {shorten(value)}, which is"
    return unsupported(name, f"{got} not supported by this server" + (f"; {advice}" if advice else ""))


@cache
def field_bounds(struct: type[msgspec.Struct]) -> Mapping[str, tuple[Bound, ...]]:
    """Return the bounds of each field that has some."""
    hints = get_type_hints(struct, include_extras=True)
    found = {name: [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bound)]
             for name, hint in hints.items()}  # fmt: skip
    return MappingProxyType({name: tuple(bounds) for name, bounds in found.items() if bounds})


def check_bounds(request: msgspec.Struct, limits: LimitsConfig) -> None:
    """Check every field that was given. Raises InvalidRequestError for the first one out of its bounds."""
    for name, bounds in field_bounds(type(request)).items():
        value = getattr(request, name)
        if value is not None:
            for bound in bounds:
                check_bound(bound, name, value, limits)


def check_bound(bound: Bound, name: str, value: Any, limits: LimitsConfig) -> None:
    """Raise InvalidRequestError naming field, value, limit and flag if `value` is out of its bound."""
    most = bound.upper(limits)
    for size in bound.sizes(value):
        if size < bound.least or (most is not None and size > most):
            raise invalid(name, f"must be {bound.words(limits)}, got {shorten(size)}")


def num_chars(value: Any) -> int:
    """Return the characters of all texts in JSON data and structs."""
    found, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found += len(item)
        elif isinstance(item, dict):
            stack += (*item.keys(), *item.values())
        elif isinstance(item, list | tuple):
            stack += item
        elif isinstance(item, msgspec.Struct):
            stack += [getattr(item, name) for name in item.__struct_fields__]
    return found


def check_json_chars(bound: Bound, name: str, value: Any, limits: LimitsConfig) -> None:
    """Raise InvalidRequestError if `value` has more characters as JSON. Texts that are too long alone are not encoded."""
    most, size = bound.upper(limits), num_chars(value)
    if most is None or size <= most:
        size = len(msgspec.json.encode(value).decode())
    if most is not None and size > most:
        raise invalid(name, f"must be {bound.words(limits)}, got {size}")


def check_count(name: str, count: int, limit: int, unit: str) -> None:
    """Raise InvalidRequestError if there are more than `limit`."""
    if count > limit:
        raise invalid(name, f"at most {limit} {unit}, got {count}")


def check_token_ids(name: str, token_ids: list[Any], vocab_size: int) -> None:
    """Raise InvalidRequestError for anything but integers in [0, vocab_size)."""
    if not token_ids:
        return
    if set(map(type, token_ids)) != {int}:
        raise invalid(name, "token ids must be integers")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        raise invalid(
            name, f"token id {shorten(low if low < 0 else high)} is outside the vocabulary (0 to {vocab_size - 1})"
        )


def invalid_field(
    text: str, value: object = msgspec.UNSET, struct: type[msgspec.Struct] | None = None
) -> InvalidRequestError:
    """Return the error for a message of msgspec. With `value` given, the text repeats it (bounded).

    struct: what was decoded; the error lists its accepted words if another one was sent.
    """
    match = _PATH.match(text)
    assert match is not None, "the pattern matches any text"
    reason, path = match["reason"], match["path"] or ""
    absent = _MISSING.match(reason)
    if absent:
        path = f"{path}.{absent['field']}" if path else absent["field"]
        return missing(path)
    wrong = _WORD.match(reason)
    choices = _choices_at(struct, _INDEX.sub("[...]", path)) if wrong and struct is not None else ()
    if wrong and choices:
        return invalid(path, f"must be one of {', '.join(map(repr, choices))}, got {shorten(wrong['word'])}")
    got = "" if value is msgspec.UNSET else f", got {shorten(value)}"
    if not path:
        return InvalidRequestError(f"Invalid body: {reason}{got}.")
    return invalid(path, f"{reason}{got}")


@cache
def _choices_at(struct: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """Return the accepted words of the field at `path`, such as `messages[...].role`, or the tags that a union has there.

    Empty if the field takes other values than such words.
    """
    kinds: list[Type] = [msgspec.inspect.type_info(struct)]
    for step in _STEP.findall(path):
        kinds = [below for kind in kinds for member in _members(kind) for below in _below(member, step)]
    literals = [member for kind in kinds for member in _members(kind) if isinstance(member, LiteralType)]
    return tuple(sorted({str(value) for literal in literals for value in literal.values}))


def _members(kind: Type) -> Iterator[Type]:
    """Yield the types that a value may have."""
    if isinstance(kind, Metadata):
        yield from _members(kind.type)
    elif isinstance(kind, UnionType):
        for member in kind.types:
            yield from _members(member)
    else:
        yield kind


def _below(kind: Type, step: str) -> Iterator[Type]:
    """Yield the types of a field or of an item."""
    if isinstance(kind, StructType):
        yield from (field.type for field in kind.fields if field.encode_name == step)
        if kind.tag_field == step:
            yield LiteralType((kind.tag,))
    elif step.startswith("[") and isinstance(kind, CollectionType):
        yield kind.item_type
    elif step.startswith("[") and isinstance(kind, DictType):
        yield kind.value_type
