"""Replies of servers that are not all like ours, over real sockets."""

from __future__ import annotations

import ssl
from typing import Any

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer

from jaxserve.tools.client import NoServerError, OutputDelta, Remote, RemoteError

CHUNK = 'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": %s}]}\n\n'


async def replies(
    *parts: str, status: int = 200, options: dict[str, Any] | None = None
) -> tuple[list[OutputDelta], Any]:
    """The deltas of a server that says `parts` and closes the connection, and the request it got."""
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json(), request.headers.get("Authorization")))
        response = web.StreamResponse(status=status)
        response.force_close()
        await response.prepare(request)
        for part in parts:
            await response.write(part.encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        remote = Remote(url=str(server.make_url("")).rstrip("/"), api_key="sk-1", options=options or {})
        deltas = [delta async for delta in remote.stream("/v1/chat/completions", {"model": "m"})]
    return deltas, seen[0]


async def test_pieces_have_text_reasoning_end_and_usage() -> None:
    deltas, (body, key) = await replies(
        ": a comment\n\n",
        'data: {"error": null, "choices": [{"delta": {"content": null, "reasoning": "hm", "reasoning_content": "hm"}}]}\n\n',
        'data: {"choices": [{"text": "old", "finish_reason": null}]}\n\n',
        CHUNK % '"stop"',
        'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n',
        options={"seed": 4},
    )
    assert body == {"model": "m", "seed": 4, "stream": True}
    assert key == "Bearer sk-1"
    assert [(p.text, p.reasoning, p.finish_reason) for p in deltas[:-1]] == [
        ("", "hm", None),
        ("old", "", None),
        ("Hi", "", "stop"),
    ]
    assert deltas[-1].usage == {"completion_tokens": 3}


async def test_a_server_that_never_says_done_is_fine_once_it_finished() -> None:
    assert [delta.text for delta in (await replies(CHUNK % '"stop"'))[0]] == ["Hi"]


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        (['{"error": {"message": "no\\nway"}}'], 400, "400 no way"),
        (["<html>gone</html>"], 502, "502 <html>gone</html>"),
        ([CHUNK % "null", 'data: {"error": {"message": "engine died"}}\n\n'], 200, "engine died"),
        ([CHUNK % "null"], 200, "broke off: the server closed the connection"),
        (["data: [1]\n\n"], 200, "not a chunk"),
        (["data: {\n\n"], 200, "broke off: JSONDecodeError"),
    ],
)
async def test_failures_are_one_line(parts: list[str], status: int, message: str) -> None:
    with pytest.raises(RemoteError) as failure:
        await replies(*parts, status=status)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


async def test_no_server_there() -> None:
    remote = Remote(url="http://127.0.0.1:1", options={})
    with pytest.raises(NoServerError, match=r"no server at http://127\.0\.0\.1:1: Connection refused"):
        await remote.first_model()
    with pytest.raises(NoServerError, match="Connection refused"):
        _ = [delta async for delta in remote.stream("/v1/completions", {})]


async def test_a_certificate_of_an_unknown_authority_is_no_missing_server() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = TestServer(web.Application())
    await server.start_server(ssl=context)
    try:
        remote = Remote(url=str(server.make_url("")).rstrip("/"), options={})
        for ask in (remote.first_model(), anext(remote.stream("/v1/completions", {}))):
            with pytest.raises(
                RemoteError, match=r"^https://127\.0\.0\.1:.*certificate verify.*SSL_CERT_FILE"
            ) as failure:
                await ask
            assert not isinstance(failure.value, NoServerError)
    finally:
        await server.close()


async def test_a_server_that_is_killed_within_a_reply_is_one_plain_line() -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write((CHUNK % "null").encode())
        assert request.transport is not None
        request.transport.close()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", die)
    async with TestServer(app) as server:
        remote = Remote(url=str(server.make_url("")).rstrip("/"), options={})
        with pytest.raises(RemoteError) as failure:
            _ = [delta async for delta in remote.stream("/v1/chat/completions", {})]
    assert str(failure.value) == "the reply broke off: the server closed the connection"


async def test_a_refused_list_of_models_says_why() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "Missing API key.", "code": "invalid_api_key"}}, status=401)

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as server:
        remote = Remote(url=str(server.make_url("")).rstrip("/"), options={})
        with pytest.raises(RemoteError, match=r"/v1/models answered 401: Missing API key\.$"):
            await remote.first_model()
