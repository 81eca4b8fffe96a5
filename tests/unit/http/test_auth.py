"""With an API key, every route that is not public is closed; without one, all are open."""

from __future__ import annotations

import pytest

from jaxserve.errors import AuthenticationError
from jaxserve.http.access import KeyRing
from jaxserve.http.app import collect_routes
from jaxserve.metrics import Metrics
from jaxserve.tenants import Tenant
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import records_of, running_api

KEYS = "first-key,zwölf"
RING = KeyRing([Tenant(record, Metrics("tiny")) for record in records_of(KEYS)])
FILES = r"/ui/{name:[a-z]+\.[a-z]+}"
PUBLIC = {"/live", "/health", "/ready", "/version", "/", FILES}


def test_the_routes_are_those_that_are_promised() -> None:
    assert {(route.method, route.path) for route in collect_routes()} >= {
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("POST", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/{response_id}/input_items"),
        ("POST", "/v1/embeddings"),
        ("POST", "/classify"),
        ("POST", "/v1/classify"),
        ("POST", "/v1/score"),
        ("POST", "/score"),
        ("POST", "/v1/rerank"),
        ("POST", "/v2/rerank"),
        ("POST", "/rerank"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{name:.+}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/startup"),
        ("GET", "/version"),
        ("GET", "/metrics"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/start_profile"),
        ("POST", "/stop_profile"),
        ("POST", "/update_weights"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/sleep"),
        ("POST", "/wake_up"),
        ("GET", "/is_paused"),
        ("GET", "/is_sleeping"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
    }


def test_probes_the_version_and_the_page_alone_are_public() -> None:
    assert {route.path for route in collect_routes() if route.is_public} == PUBLIC


async def test_every_other_route_asks_for_the_key(tokenizer: Tokenizer) -> None:
    paths = [
        (route.method, route.path.replace("{name:.+}", "tiny").replace(FILES, "/ui/main.js"))
        for route in collect_routes()
    ]
    paths += [
        ("GET", "/nowhere"),
        ("GET", "/v1/../metrics"),
        ("POST", "/health"),
        ("GET", "/health/"),
        ("GET", "/healthx"),
    ]
    async with running_api(tokenizer, api_key=KEYS) as api:
        for method, path in paths:
            async with api.http.request(method, path) as response:
                is_open = (method, path) in {("GET", public.replace(FILES, "/ui/main.js")) for public in PUBLIC}
                assert (response.status != 401) == is_open, (method, path)
                if not is_open:
                    error = (await response.json())["error"]
                    assert "invalid_api_key" in error.values() or error["type"] == "authentication_error"
                    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first-key", "zwölf"])
async def test_each_key_opens(tokenizer: Tokenizer, key: str) -> None:
    async with running_api(tokenizer, api_key=KEYS) as api:
        headers = {"Authorization": f"Bearer {key}"}
        async with api.http.get("/v1/models", headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic first-key",
        "first-key",
        "Bearer first-key,",
        "Bearer \udcff",
    ],
)
def test_anything_else_is_refused(header: str | None) -> None:
    with pytest.raises(AuthenticationError):
        RING.check(header)


@pytest.mark.parametrize("api_key", ["first-key", " zwölf "])
def test_a_header_with_the_key_alone_opens_too(api_key: str) -> None:
    RING.check(None, api_key)


@pytest.mark.parametrize(
    ("header", "api_key"), [(None, "wrong"), (None, ""), ("Bearer wrong", "first-key"), (None, "\udcff")]
)
def test_one_header_counts(header: str | None, api_key: str) -> None:
    with pytest.raises(AuthenticationError):
        RING.check(header, api_key)


def test_scheme_is_case_insensitive() -> None:
    RING.check("bearer first-key")


def test_without_keys_everybody_may_pass() -> None:
    KeyRing().check(None)


async def test_key_is_asked_before_the_body_is_read(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, api_key=KEYS) as api:
        status, body = await api.post("/v1/completions", data=b"x" * 100_000)
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
