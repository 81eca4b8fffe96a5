"""The items of a response, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from jaxserve.apis.responses.items import Item
from jaxserve.apis.responses.response import ItemList
from jaxserve.bounds import Bound
from jaxserve.errors import invalid
from jaxserve.frontend.checks import shorten

_DEFAULT_LIMIT: Final = 20


class PageQuery(msgspec.Struct, kw_only=True):
    """The query that chooses items of a list."""

    after: Annotated[str | None, Meta(description="Return items after the one with this id.")] = None
    limit: Annotated[int | None, Bound("value", 1, 100), Meta(description="Maximum number of items. Default: 20.")] = (
        None
    )
    order: Annotated[
        Literal["asc", "desc"] | None, Meta(description="`asc` or `desc` (newest first). Default: `desc`.")
    ] = None


def page_of(items: Sequence[Item], query: PageQuery) -> ItemList:
    """Return the requested page. Raises InvalidRequestError for an unknown id."""
    ordered = list(items if query.order == "asc" else reversed(items))
    if query.after:
        ids = [item.id for item in ordered]
        if query.after not in ids:
            raise invalid("after", f"no item has the id {shorten(query.after)}")
        ordered = ordered[ids.index(query.after) + 1 :]
    page = ordered[: query.limit or _DEFAULT_LIMIT]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > len(page),
    )
