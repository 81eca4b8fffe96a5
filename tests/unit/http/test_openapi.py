"""The document and the page describe every route, and what they say holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.apis.routes import Route
from jaxserve.config import LimitsConfig
from jaxserve.http.app import collect_routes
from jaxserve.http.docs_page import docs_page
from jaxserve.http.openapi import openapi_document
from jaxserve.http.schema_words import range_text, type_text
from tests.unit.running_api import Api

ROUTES = tuple(collect_routes())
DOCUMENT = openapi_document(ROUTES, LimitsConfig())
SCHEMAS = DOCUMENT["components"]["schemas"]


def operation_of(route: Route) -> dict[str, Any]:
    return DOCUMENT["paths"][re.sub(r":[^}]*", "", route.path)][route.method.lower()]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from references(child)
    elif isinstance(node, list):
        for child in node:
            yield from references(child)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_route_is_described(route: Route) -> None:
    operation = operation_of(route)
    assert operation["summary"] == route.headline
    assert route.headline.endswith(".")
    assert (operation["security"] == []) is route.is_public
    assert ("401" in operation["responses"]) is not route.is_public
    if route.request is not None:
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert list(SCHEMAS[name]["properties"]) == list(route.request.__struct_encode_fields__)
        assert {"400", "413", "415", "429", "503"} <= operation["responses"].keys()
    assert ("text/event-stream" in operation["responses"]["200"]["content"]) is (route.event is not None)


def test_there_is_one_operation_per_route_with_its_own_name() -> None:
    operations = [operation for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)


def test_every_reference_leads_somewhere() -> None:
    found = list(references(DOCUMENT))
    assert len(found) > len(ROUTES)
    for reference in found:
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


@pytest.mark.parametrize("route", [route for route in ROUTES if route.request], ids=lambda route: route.path)
def test_every_field_of_a_request_says_what_it_does(route: Route) -> None:
    assert route.request is not None
    fields = SCHEMAS[route.request.__name__]["properties"]
    assert [name for name, schema in fields.items() if "description" not in schema] == []


def test_a_field_of_the_sampler_is_described_where_it_is_defined() -> None:
    assert SCHEMAS["ChatRequest"]["properties"]["min_p"]["description"].startswith("Keep tokens at least min_p times")


def test_ranges_are_documented_as_they_are_checked() -> None:
    fields = SCHEMAS["ChatRequest"]["properties"]
    assert (fields["n"]["minimum"], fields["n"]["maximum"]) == (1, 128)
    assert fields["n"]["description"].endswith("Limit: `--max-choices`.")
    assert (fields["stop"]["maxItems"], fields["stop"]["items"]) == (16, {"minLength": 1, "maxLength": 1024})
    assert (fields["top_p"]["minimum"], fields["top_p"]["maximum"]) == (0, 1)
    assert fields["top_k"]["minimum"] == -1


def test_limits_of_the_server_are_documented() -> None:
    schemas = openapi_document(ROUTES, LimitsConfig(max_tools=7))["components"]["schemas"]
    assert schemas["ChatRequest"]["properties"]["tools"]["maxItems"] == 7


def test_parameters_of_a_query_are_documented() -> None:
    _, after, limit, order = DOCUMENT["paths"]["/v1/responses/{response_id}/input_items"]["get"]["parameters"]
    assert (after["in"], after["schema"]) == ("query", {"type": "string"})
    assert (limit["name"], limit["schema"]) == ("limit", {"type": "integer", "minimum": 1, "maximum": 100})
    assert order["schema"] == {"enum": ["asc", "desc"]}


def test_a_server_without_keys_asks_for_none() -> None:
    operations = openapi_document(ROUTES, LimitsConfig(), False)["paths"]["/v1/models"]
    assert operations["get"]["security"] == []
    assert "401" not in operations["get"]["responses"]


async def test_document_and_page_are_served_and_load_nothing(api: Api) -> None:
    async with api.http.get("/openapi.json") as response:
        document = await response.json()
    assert document == openapi_document(ROUTES, LimitsConfig(), False)
    async with api.http.get("/docs") as response:
        assert response.content_type == "text/html"
        page = await response.text()
    assert page == docs_page(document)
    assert re.findall(r"<script|<link|<img|https?:|url\(", page) == []
    for path in DOCUMENT["paths"]:
        assert f"<code>{path}</code>" in page
    links, anchors = set(re.findall(r'href="#([^"]+)"', page)), set(re.findall(r'id="([^"]+)"', page))
    assert links
    assert links <= anchors


def test_texts_of_the_page_are_escaped() -> None:
    schema = {"properties": {"a": {"type": "string", "description": "<b> & `x`"}}, "required": ["a"]}
    page = docs_page(
        {
            "info": {"title": "<t>", "version": "1"},
            "paths": {},
            "components": {"responses": {}, "schemas": {"S": schema}},
        }
    )
    assert "&lt;b&gt; &amp; <code>x</code>" in page
    assert "<t>" not in page


def test_ranges_read_as_words() -> None:
    fields = SCHEMAS["ChatRequest"]["properties"]
    assert range_text(fields["n"]) == "1 to 128"
    assert range_text(fields["top_p"]) == "0 to 1"
    assert range_text(fields["stop"]) == "0 to 16 items, 1 to 1024 characters"
    assert range_text(fields["seed"]) == "-2^63 to 2^63 - 1"
    assert range_text(fields["max_tokens"]) == "at least 1"
    assert range_text(fields["model"]) == ""


def test_types_read_as_words() -> None:
    reference = {"$ref": "#/components/schemas/Usage"}
    assert type_text({"anyOf": [{"type": "array", "items": reference}, {"type": "null"}]}) == "list of <Usage>"
    assert type_text({"type": "object", "additionalProperties": {"type": "number"}}) == "object of number"
    assert type_text({"enum": ["low", 1]}) == '"low" or 1'


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", "[DONE]"),
        ("/v1/completions", "[DONE]"),
        ("/v1/responses", None),
        ("/v1/messages", None),
    ],
)
def test_streams_that_end_with_words_say_so(path: str, last: str | None) -> None:
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    data = content["schema"]["properties"]["data"]
    assert (data["anyOf"][1:] if last else data.get("anyOf")) == ([{"const": last}] if last else None)
