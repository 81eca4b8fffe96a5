"""Paths that are nearly those of a route: with a slash at the end, with a part twice, without the version; and paths of other servers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from jaxserve.apis.routes import ApiStyle, Route

_SLASHES = re.compile(r"/{2,}")
_VERSIONS = re.compile(r"(/v\d+)+(?=/v\d+/)")
_MAX_CHARS = 256
_LIKENESS: Final = 0.85
"""The least share of equal letters of two paths of which one is taken for the other, misspelt."""
_KINDS: Final = "It reads texts and images, and writes texts."
_STORES: Final = "It keeps no files and no jobs: send requests side by side, it computes them together."
_OLLAMA: Final = "It speaks OpenAI's and Anthropic's API, not Ollama's: use /v1/chat/completions, /v1/completions, /v1/models or /v1/embeddings."
_OLLAMA_NAMES: Final = "blobs chat copy create delete embed embeddings generate ps pull push show tags version".split()
UNSERVED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/v1/responses/compact": "It does not compact conversations: ask for a summary with /v1/responses, and go on from that.",
        "/v1/conversations": "It keeps no conversations: send the items, or previous_response_id.",
        "/v1/assistants": "Use /v1/responses.",
        "/v1/threads": "Use /v1/responses.",
        "/v1/messages/batches": _STORES,
        "/v1/batches": _STORES,
        "/v1/files": _STORES,
        "/v1/uploads": _STORES,
        "/v1/vector_stores": "It keeps no vectors: /v1/embeddings makes them, /v1/rerank orders texts.",
        "/v1/fine_tuning": "It does not train. Adapters that others trained are loaded with --lora-modules or /v1/load_lora_adapter.",
        "/v1/moderations": "Serve a classifier, and ask /classify.",
        "/v1/audio": _KINDS,
        "/v1/images": _KINDS,
        "/v1/videos": _KINDS,
        "/v1/realtime": _KINDS,
        "/pooling": "Use /v1/embeddings, /v1/score, /v1/rerank or /classify.",
        "/generate": "Use /v1/completions.",
        "/completion": "Use /v1/completions.",
        "/infill": "Use /v1/completions with the model's own tokens for the gap.",
        "/embedding": "Use /v1/embeddings.",
        "/apply-template": "/tokenize with messages returns the tokens of the prompt that they make, /detokenize its text.",
        "/lora-adapters": "Use /v1/load_lora_adapter, and an adapter's name as `model` of a request.",
        "/props": "/v1/models has the name and the context length, /tokenizer_info the chat template.",
        "/slots": "`jaxserve status` and /metrics show what runs.",
        "/load": "`jaxserve status` and /metrics show what runs.",
        "/server_info": "/v1/models has the name and the context length, `jaxserve config` prints the settings.",
        "/get_model_info": "/v1/models has the name and the context length.",
        "/get_server_info": "/v1/models has the name and the context length, `jaxserve config` prints the settings.",
        **{f"/api/{name}": _OLLAMA for name in _OLLAMA_NAMES},
    }
)
"""The advice for endpoints that only other servers have, by path; paths below one have the same."""


@dataclass(frozen=True, slots=True)
class PathHint:
    """The advice to a client that used a path without a route."""

    text: str
    is_unserved: bool = False
    """True: the path is an endpoint of other servers."""


def path_hint(path: str, routes: Iterable[Route]) -> PathHint:
    """Return what a client may do instead of using a path that has no route."""
    if (instead := instead_of(path)) is not None:
        return PathHint(instead, is_unserved=True)
    likely = likely_path(path, routes)
    return PathHint("/docs lists the known ones." if likely is None else f"Did you mean {likely}?")


def instead_of(path: str) -> str | None:
    """Return what to use instead of a known endpoint that is not served; None for any other path."""
    plain = path.rstrip("/")
    return next((text for known, text in UNSERVED.items() if plain == known or plain.startswith(f"{known}/")), None)


def with_slash(route: Route) -> str | None:
    """Return the second path at which a route is served; None if it has none.

    Public routes have none, so that what needs no key is exactly what is listed.
    """
    return None if route.is_public or route.path.endswith("/") or ":" in route.path else f"{route.path}/"


def likely_path(path: str, routes: Iterable[Route]) -> str | None:
    """Return the path of a route that the client may have meant; None if there is no such."""
    if len(path) > _MAX_CHARS:
        return None
    known = {route.path for route in routes if "{" not in route.path}
    plain = _VERSIONS.sub("", _SLASHES.sub("/", path)).rstrip("/")
    if plain in known and plain != path:
        return plain
    ends = [one for one in known if one.count("/") > 1 and (one.endswith(plain) or plain.endswith(one))]
    if plain.count("/") and ends:
        return min(ends, key=lambda one: abs(len(one) - len(plain)))
    return next(iter(difflib.get_close_matches(plain, sorted(known), n=1, cutoff=_LIKENESS)), None)


def style_of_path(path: str, styles: Mapping[str, ApiStyle]) -> ApiStyle:
    """Return the style of the API to which an unknown path belongs, by the paths of routes with a style of their own."""
    plain = _SLASHES.sub("/", path)
    return next(
        (style for known, style in styles.items() if plain == known or plain.startswith(f"{known}/")), ApiStyle()
    )
