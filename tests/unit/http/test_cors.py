"""Web pages may call where the server says so, and nowhere else."""

from __future__ import annotations

import pytest

from jaxserve.http.access import CorsPolicy
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import running_api

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


async def test_without_the_setting_no_page_may_call(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, api_key="secret") as api:
        async with api.http.get("/health", headers={"Origin": PAGE}) as response:
            assert [name for name in response.headers if name.startswith("Access-Control")] == []
        async with api.http.options("/v1/chat/completions", headers=PREFLIGHT) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_an_allowed_page_may_ask_first_and_read_every_reply(tokenizer: Tokenizer) -> None:
    origins = f"http://localhost:3000, {PAGE}"
    async with running_api(tokenizer, api_key="secret", cors_allowed_origins=origins) as api:
        async with api.http.options("/v1/chat/completions", headers=PREFLIGHT) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
            assert response.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in response.headers
        async with api.http.get("/v1/models", headers={"Origin": PAGE}) as response:
            assert response.status == 401  # the page is allowed, but has no key
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        async with api.http.options("/v1/models", headers={"Origin": PAGE}) as response:
            assert response.status == 401  # no question of a browser


@pytest.mark.parametrize("origin", ["https://evil.example.org", PAGE + ".evil.org", "null", "HTTPS://CHAT.example.org"])
async def test_another_page_may_not(tokenizer: Tokenizer, origin: str) -> None:
    async with (
        running_api(tokenizer, cors_allowed_origins=PAGE) as api,
        api.http.options("/v1/models", headers=PREFLIGHT | {"Origin": origin}) as response,
    ):
        assert response.status == 403
        assert "Access-Control-Allow-Origin" not in response.headers


def test_a_star_allows_all_and_echoes_none() -> None:
    headers = CorsPolicy("*").headers({"Origin": PAGE})
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert CorsPolicy("*").headers({}) == {}


def test_names_of_headers_are_not_echoed_when_they_are_none() -> None:
    asked = PREFLIGHT | {"Access-Control-Request-Headers": "a\tb"}
    headers = CorsPolicy("*").preflight_headers(asked)
    assert headers is not None
    assert headers["Access-Control-Allow-Headers"] == ""
