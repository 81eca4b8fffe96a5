"""The OpenAPI document as one page of HTML: no script, no style sheet, nothing to load."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from jaxserve.http.schema_words import payload_of, range_text, type_text

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
code { font: 14px ui-monospace, monospace; background: #f2f2f2; padding: 0 .2em; }
table { border-collapse: collapse; width: 100%; } td, th { border-top: 1px solid #ddd; padding: .3rem .6rem;
text-align: left; vertical-align: top; } summary { cursor: pointer; } details { margin: .5rem 0; }
.method { display: inline-block; min-width: 4rem; font-weight: bold; }
"""


def docs_page(document: dict[str, Any]) -> str:
    """Return the page in HTML."""
    title = f"{document['info']['title']} {document['info']['version']}"
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
            '<p>The same for programs: <a href="openapi.json">openapi.json</a></p>',
            *_paths(document),
            "<h2>Errors</h2>",
            *(_error(name, response) for name, response in document["components"]["responses"].items()),
            "<h2>Schemas</h2>",
            *(_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
            "</body></html>",
        ]
    )


def _paths(document: dict[str, Any]) -> Iterator[str]:
    tags = dict.fromkeys(
        operation["tags"][0] for operations in document["paths"].values() for operation in operations.values()
    )
    for tag in sorted(tags):
        yield f"<h2>{html.escape(tag)}</h2>"
        for path, operations in sorted(document["paths"].items()):
            for method, operation in operations.items():
                if operation["tags"][0] == tag:
                    yield _operation(method, path, operation)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = []
    if "requestBody" in operation:
        rows.append(("body", _media(operation["requestBody"]["content"])))
    for status, response in operation["responses"].items():
        shown = response.get("description") or f"<{response['$ref'].rpartition('/')[2]}>"
        rows.append((status, _media(response["content"]) if "content" in response else _linked(shown)))
    guard = "" if operation["security"] else " (open)"
    return (
        f'<details><summary><span class="method">{method.upper()}</span> <code>{html.escape(path)}</code> '
        f"{html.escape(operation['summary'])}{guard}</summary><table>"
        + "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in rows)
        + "</table></details>"
    )


def _media(content: dict[str, Any]) -> str:
    return "<br>".join(
        f"<code>{html.escape(media)}</code> {_linked(type_text(payload_of(spec['schema'])))}"
        for media, spec in content.items()
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{html.escape(field)}</code></td><td>{_linked(type_text(spec))}"
        f"{' (required)' if field in required else ''}</td><td>{range_text(spec)}</td><td>{_prose(spec.get('description', ''))}</td></tr>"
        for field, spec in schema.get("properties", {}).items()
    )
    text = _prose(schema.get("description", ""))
    return f'<h3 id="{html.escape(name)}">{html.escape(name)}</h3><p>{text}</p><table>{rows}</table>'


def _error(name: str, response: dict[str, Any]) -> str:
    return f'<p id="{html.escape(name)}"><b>{html.escape(name)}</b> {_prose(response["description"])}</p>'


def _linked(text: str) -> str:
    """Names in angle brackets become links to their schemas."""
    return re.sub(r"&lt;([\w.-]+)&gt;", r'<a href="#\1">\1</a>', html.escape(text))


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
