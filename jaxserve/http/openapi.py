"""The description of the whole API as an OpenAPI 3.1 document, made of the routes and their structs alone."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxserve import __version__
from jaxserve.apis.routes import ApiStyle, Route
from jaxserve.apis.schema.unsupported import IGNORED_HEADER
from jaxserve.config import LimitsConfig
from jaxserve.errors import REQUEST_ERRORS, RequestError
from jaxserve.frontend.checks import field_bounds
from jaxserve.http.inputs import HEADER as REQUEST_ID_HEADER

_SCHEMAS = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_BODY_STATUSES = (400, 404, 413, 415, 429, 503)
"""Error statuses of a request with a body."""


@functools.lru_cache(maxsize=1)
def openapi_document(routes: tuple[Route, ...], limits: LimitsConfig, is_guarded: bool = True) -> dict[str, Any]:
    """Return the document, which must not be changed.

    is_guarded: True if the server has keys.
    """
    types = list(_types_of(routes))
    schemas, components = msgspec.json.schema_components(types, ref_template=_SCHEMAS)
    for struct in _structs_of(msgspec.inspect.multi_type_info(types)):
        _describe(struct, components[struct.__name__]["properties"], limits)
    by_type = dict(zip(map(_key, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(
            route, by_type, _parameters(route, components), is_guarded=is_guarded and not route.is_public
        )
    styles = dict.fromkeys(route.style for route in routes)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {name: body for style in styles for name, body in _error_responses(style, by_type)},
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _describe(struct: type[msgspec.Struct], properties: dict[str, Any], limits: LimitsConfig) -> None:
    """Add the bounds of fields to their schemas, and the flags that raise them to their descriptions."""
    names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    for name, bounds in field_bounds(struct).items():
        schema = properties[names[name]]
        for bound in bounds:
            schema |= bound.keywords(limits)
        flags = [f"`{bound.flag}`" for bound in bounds if bound.flag is not None]
        if flags:
            schema["description"] = f"{schema.get('description', '')} Limit: {', '.join(flags)}.".strip()


def _types_of(routes: Iterable[Route]) -> Iterator[Any]:
    for route in routes:
        others = (reply for _, reply in route.other_replies)
        own = (route.style.error_struct, route.query, route.request, route.reply, route.event, *others)
        yield from (kind for kind in own if kind is not None)


def _key(kind: Any) -> str:
    """Unions are not all hashable."""
    return repr(kind)


def _structs_of(types: Iterable[msgspec.inspect.Type]) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct that is reached from `types`, once."""
    waiting, seen = list(types), set()
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls in seen:
                continue
            seen.add(kind.cls)
            yield kind.cls
            waiting += [field.type for field in kind.fields]
        elif isinstance(kind, msgspec.inspect.UnionType):
            waiting += kind.types
        elif isinstance(kind, msgspec.inspect.TupleType):
            waiting += kind.item_types
        elif isinstance(kind, msgspec.inspect.CollectionType):
            waiting.append(kind.item_type)
        elif isinstance(kind, msgspec.inspect.DictType):
            waiting.append(kind.value_type)
        elif isinstance(kind, msgspec.inspect.Metadata):
            waiting.append(kind.type)


def _operation(
    route: Route, by_type: dict[str, Any], parameters: list[dict[str, Any]], *, is_guarded: bool
) -> dict[str, Any]:
    statuses = {500, *route.errors, *((401,) if is_guarded else ())}
    operation: dict[str, Any] = {
        "operationId": route.name or route.handler.__name__,
        "summary": route.headline,
        "tags": [route.tag],
        "security": [{"bearer": []}, {"header": []}] if is_guarded else [],
    }
    if parameters:
        statuses |= {400, 404}
        operation["parameters"] = parameters
    headers = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
    if route.request is not None:
        statuses |= set(_BODY_STATUSES)
        headers[IGNORED_HEADER] = {"$ref": "#/components/headers/Ignored"}
        content = {"application/json": {"schema": by_type[_key(route.request)]}}
        operation["requestBody"] = {"required": True, "content": content}
    content = {route.media_type: {"schema": by_type.get(_key(route.reply), {"type": "string"})}}
    if route.event is not None:
        content["text/event-stream"] = {"schema": _event(by_type[_key(route.event)], route.last_event)}
    responses = {"200": {"description": "The reply.", "headers": headers, "content": content}}
    error = route.style.error_struct.__name__
    responses |= {str(status): {"$ref": f"#/components/responses/{error}{status}"} for status in sorted(statuses)}
    for status, reply in route.other_replies:
        content = {"application/json": {"schema": by_type[_key(reply)]}}
        responses[str(status)] = {"description": "Not now.", "headers": headers, "content": content}
    operation["responses"] = responses
    return operation


def _parameters(route: Route, components: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of the path, then those of the query."""
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]
    fields = {} if route.query is None else components[route.query.__name__]["properties"]
    for name, schema in fields.items():
        words = {
            word: value for word, value in schema.items() if word not in ("anyOf", "enum", "default", "description")
        }
        names = {"enum": [value for value in schema.get("enum", ()) if value is not None]}
        (kind,) = [option for option in schema.get("anyOf", [names]) if option != {"type": "null"}]
        found.append({"name": name, "in": "query", "description": schema["description"], "schema": kind | words})
    return found


def _event(data: dict[str, Any], last: str | None) -> dict[str, Any]:
    """Return the schema of a server-sent event, as OpenAPI 3.2 describes it."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    either = text if last is None else {"anyOf": [text, {"const": last}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": either}, "required": ["data"]}


def _error_responses(style: ApiStyle, by_type: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one response per status of the exception tree, by name."""
    schema = by_type[_key(style.error_struct)]
    for error in REQUEST_ERRORS.values():
        if "status" not in vars(error) or error is RequestError:
            continue
        codes = dict.fromkeys(kind.default_code for kind in REQUEST_ERRORS.values() if issubclass(kind, error))
        known = ", ".join(f"`{code}`" for code in codes if code is not None)
        headers = {REQUEST_ID_HEADER: {"$ref": "#/components/headers/RequestId"}}
        if error.status in (429, 503):
            headers["Retry-After"] = {"$ref": "#/components/headers/RetryAfter"}
        yield (
            f"{style.error_struct.__name__}{error.status}",
            {
                "description": f"{_first_line(error)} `code`: {known}.",
                "headers": headers,
                "content": {"application/json": {"schema": schema}},
            },
        )


def _first_line(documented: object) -> str:
    """Return the first line of a docstring."""
    return inspect.cleandoc(documented.__doc__ or "").split("\n")[0]


_HEADERS = {
    "RequestId": {"description": "The request's own, or a new one.", "schema": {"type": "string"}},
    "Ignored": {
        "description": "Fields of the body that had no effect, comma separated.",
        "schema": {"type": "string"},
    },
    "RetryAfter": {"description": "Seconds.", "schema": {"type": "integer"}},
}
