"""An endpoint is one file: its route and structs are served, checked, and described in the API's documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.additions.overlay import Overlay, unnamed
from tests.e2e.http_server import await_ready, fake_server_command, launched

pytestmark = pytest.mark.slow

ENDPOINT = '''"""`POST /v1/echo`: the token count of a text, and the text of a continuation."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from jaxserve.apis.routes import Call, Route
from jaxserve.bounds import Bound
from jaxserve.frontend.prepare import prepare
from jaxserve.frontend.request import GenerationRequest, Texts
from jaxserve.frontend.sampling import SamplerFields


class EchoRequest(SamplerFields, kw_only=True):
    text: Annotated[str, Bound("characters", 1, 9), Meta(description="The text to echo.")]


class EchoReply(msgspec.Struct):
    text: str
    num_generated: int


@partial(Route, "POST", "/v1/echo", tag="OpenAI", reply=EchoReply)
async def echo(call: Call, body: EchoRequest) -> EchoReply:
    """Echo a text after generating three tokens."""
    request = GenerationRequest(prompt=Texts(prompts=[body.text]), sampling=body, max_tokens=3)
    request.check(call.frontend.limits)
    call.cleanup.enter_context(call.frontend.admitted(request))
    handle = call.cleanup.enter_context(await prepare(call.frontend, request))
    await handle.collect()
    return EchoReply(body.text, handle.counts().num_completion)
'''


def test_an_endpoint_is_one_file(overlay: Overlay, tmp_path: Path) -> None:
    overlay.add("jaxserve/apis/openai/echo.py", ENDPOINT)
    assert unnamed(overlay, "an endpoint") == set()
    command = fake_server_command({"server": {"port": 0, "uds_dir": str(tmp_path)}})
    with launched(command, overlay.root, overlay.python_path) as server:
        await_ready(server)
        status, _, reply = server.request("POST", "/v1/echo", {"text": "hello"})
        assert (status, json.loads(reply)) == (200, {"text": "hello", "num_generated": 3})
        status, _, reply = server.request("POST", "/v1/echo", {"text": "0123456789"})
        assert (status, json.loads(reply)["error"]["param"]) == (400, "text")
        _, _, page = server.request("GET", "/openapi.json")
        operation = json.loads(page)["paths"]["/v1/echo"]["post"]
        assert operation["summary"] == "Echo a text after generating three tokens."
        assert b"/v1/echo" in server.request("GET", "/docs")[2]
    overlay.run("-m", "jaxserve.cli.internal.reference", "docs/reference")
    assert "The text to echo." in (overlay.root / "docs" / "api.md").read_text("utf-8")
