"""The items of a response, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jaxserve.errors import InvalidRequestError
from jaxserve.server.schema.decode import shorten
from jaxserve.server.schema.response_items import Item
from jaxserve.server.schema.response_object import ItemList

_DEFAULT_LIMIT: Final = "20"
_MAX_LIMIT: Final = 100


def page_of(items: Sequence[Item], *, after: str = "", limit: str = _DEFAULT_LIMIT, order: str = "desc") -> ItemList:
    """At most `limit` items behind the one with id `after`, the newest first unless `order` is asc.

    The arguments are those of a URL. Raises InvalidRequestError.
    """
    if order not in ("asc", "desc"):
        raise _invalid("order", f"must be asc or desc, got {shorten(order)}")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_LIMIT):
        raise _invalid("limit", f"must be between 1 and {_MAX_LIMIT}, got {shorten(limit)}")
    ordered = list(items if order == "asc" else reversed(items))
    if after:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise _invalid("after", f"no item has the id {shorten(after)}")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > len(page),
    )


def _invalid(name: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"Invalid value for '{name}': {reason}.", param=name)
