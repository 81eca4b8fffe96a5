"""Reading the query of a URL."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from jaxserve.frontend.checks import check_bounds, invalid_field, refuse, shorten
from jaxserve.http.state import STATE

T = TypeVar("T", bound=msgspec.Struct)


def read_query(http: web.Request, struct: type[T]) -> T:
    """Return the parameters. Raises RequestError, also for unknown ones unless they are `false`."""
    names = struct.__struct_fields__
    for name, value in http.query.items():
        if name not in names and value != "false":
            raise refuse(shorten(name.removesuffix("[]"))[1:-1])
    given = {name: http.query[name] for name in names if name in http.query}
    try:
        query = msgspec.convert(given, struct, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct=struct) from None
    check_bounds(query, http.app[STATE].frontend.limits)
    return query
