"""Reading what stands behind the question mark of a URL."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from aiohttp import web

from jaxserve.apis.schema.decode import invalid_field, shorten
from jaxserve.apis.schema.unsupported import refuse
from jaxserve.frontend.bounds import check_bounds
from jaxserve.http.state import STATE

T = TypeVar("T", bound=msgspec.Struct)


class NoQuery(msgspec.Struct):
    """Of a route that takes no parameters."""


def read_query(http: web.Request, struct: type[T]) -> T:
    """The parameters. Refuses others, which would have to be honoured, unless they are `false`. Raises RequestError."""
    names = struct.__struct_fields__
    for name, value in http.query.items():
        if name not in names and value != "false":
            raise refuse(shorten(name.removesuffix("[]"))[1:-1])
    given = {name: http.query[name] for name in names if name in http.query}
    try:
        query = msgspec.convert(given, struct, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), struct=struct) from None
    check_bounds(query, http.app[STATE].limits)
    return query
