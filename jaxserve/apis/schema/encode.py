"""Replies as JSON, in parts that are short enough for an event loop beside them.

One call of the encoder keeps the interpreter's lock, however long it takes. So a large reply is encoded in a thread, list
by list, in parts of a few hundred items: other threads run between two parts.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

_MAX_ITEMS: Final = 256
"""Items of a list that one call encodes."""
_LARGE: Final = 4096
"""Weight from which on a reply is encoded in a thread: about two milliseconds of work."""
_TEXT_CHARS: Final = 64 << 10
"""Characters of a text that one call encodes: a quarter of a millisecond if all are escaped."""
_CHARS_PER_ITEM: Final = 64
"""Characters of a text that weigh as much as one item."""

_encode = msgspec.json.Encoder().encode


async def encode_reply(reply: msgspec.Struct) -> bytes:
    """Return the reply as JSON without keeping the event loop busy for long."""
    return await asyncio.to_thread(encode_in_parts, reply) if is_large(reply) else _encode(reply)


def is_large(value: Any) -> bool:
    """Return True if encoding takes too long for an event loop. Looks at no more values than that takes."""
    weight, stack = 0, [value]
    while stack and weight < _LARGE:
        item = stack.pop()
        weight += 1
        if isinstance(item, str):
            weight += len(item) // _CHARS_PER_ITEM
        elif isinstance(item, list | tuple):
            stack += item[:_LARGE]
            weight += len(item) if item and isinstance(item[0], int | float) else 0
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, msgspec.Struct):
            stack += [getattr(item, name) for name in item.__struct_fields__]
    return weight >= _LARGE


def encode_in_parts(value: Any) -> bytes:
    """Return `value` as JSON; equal to what one call of the encoder returns."""
    return _encode(_prepared(value))


def _prepared(value: Any) -> Any:
    """Return `value` with its long lists and texts as JSON."""
    if isinstance(value, str) and len(value) > _TEXT_CHARS:
        parts = (_encode(value[start : start + _TEXT_CHARS])[1:-1] for start in range(0, len(value), _TEXT_CHARS))
        return msgspec.Raw(b'"%b"' % b"".join(parts))
    if isinstance(value, list | tuple):
        return _prepared_list(value)
    if isinstance(value, dict):
        return {name: _prepared(child) for name, child in value.items()}
    if isinstance(value, msgspec.Struct):
        changed = {}
        for name in value.__struct_fields__:
            child = getattr(value, name)
            if (prepared := _prepared(child)) is not child:
                changed[name] = prepared
        return msgspec.structs.replace(value, **changed) if changed else value
    return value


def _prepared_list(values: Any) -> Any:
    if not values or (len(values) <= _MAX_ITEMS and not isinstance(values[0], list | tuple | dict | msgspec.Struct)):
        return values
    parts = []
    for start in range(0, len(values), _MAX_ITEMS):
        part = [_prepared(item) for item in values[start : start + _MAX_ITEMS]]
        parts.append(_encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
