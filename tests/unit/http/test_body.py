"""Unknown fields, and bodies that do not arrive."""

from __future__ import annotations

import asyncio

from jaxserve.config import ConnectionConfig
from jaxserve.frontend.checks import MAX_ECHOED_CHARS
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.running_api import running_api


async def test_strict_rejects_an_unknown_field(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, is_strict=True) as api:
        status, reply = await api.post("/tokenize", {"prompt": "x", "temprature": 1})
        assert status == 400
        assert reply["error"]["message"] == "Unknown parameter: 'temprature' (--strict-parameters)."
        assert (reply["error"]["param"], reply["error"]["code"]) == ("temprature", "unknown_parameter")
        status, reply = await api.post("/tokenize", {"prompt": "x", "suffix": "y"})
        assert (status, reply["error"]["code"]) == (400, "unsupported_parameter")
        assert (await api.post("/tokenize", {"prompt": "x", "suffix": None, "user": "u"}))[0] == 200
        status, reply = await api.post("/tokenize", {"prompt": "x", "y" * 9999: 1})
        assert (status, len(reply["error"]["param"])) == (400, MAX_ECHOED_CHARS)


async def test_a_body_that_does_not_arrive_is_not_waited_for(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, connection=ConnectionConfig(body_timeout=0.05)) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
        writer.write(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"within 0.05 s (--body-timeout)" in await asyncio.wait_for(reader.readuntil(b"}}"), 60)
        writer.close()


async def test_too_many_headers_are_refused(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, connection=ConnectionConfig(max_headers=16)) as api:
        for count, status in ((5, 200), (20, 400)):
            async with api.http.get("/health", headers={f"X-{i}": "x" for i in range(count)}) as response:
                assert response.status == status


async def test_a_long_header_is_refused_naming_the_setting(tokenizer: Tokenizer) -> None:
    connection = ConnectionConfig(max_header_size=1024, max_request_line=2048)
    async with running_api(tokenizer, connection=connection) as api:
        for path, header, is_refused in (
            ("/health", "x" * 900, False),
            ("/health", "x" * 4000, True),
            ("/" + "y" * 4000, "x", True),
        ):
            async with api.http.get(path, headers={"X-Header": header}) as response:
                assert (response.status == 431) is is_refused
                if is_refused:
                    text = (await response.json())["error"]["message"]
                    assert "2048 bytes (--max-request-line)" in text
                    assert "1024 (--max-header-size)" in text
