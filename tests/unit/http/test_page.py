"""The page at `/`: its files are whole, it loads nothing from elsewhere, and its summary has no texts of requests."""

from __future__ import annotations

import asyncio
import logging
import re
from importlib.resources import files
from typing import Any

import pytest
from aiohttp import ClientResponse

from jaxserve.ipc.messages import StepOutputs
from jaxserve.ipc.stats import EngineStats
from jaxserve.tokenizer.tokenizer import Tokenizer
from tests.unit.apis.test_replies import EOS, play
from tests.unit.running_api import MAX_MODEL_LEN, Api, running_api

FOLDER = files("jaxserve.http") / "ui"
NAMES = sorted(file.name for file in FOLDER.iterdir())
LINKED = re.compile(r"""(?:src|href|from)[ =]+"([^"]+)\"""")


def check_policy(response: ClientResponse) -> None:
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_page_and_its_files_need_no_key_and_carry_a_policy(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, has_page=True, api_key="secret") as api:
        for path, kind in [("/", "text/html")] + [
            (f"/ui/{name}", {"js": "text/javascript", "css": "text/css", "html": "text/html"}[name.rpartition(".")[2]])
            for name in NAMES
        ]:
            async with api.http.get(path) as response:
                assert (response.status, response.content_type, response.charset) == (200, kind, "utf-8")
                check_policy(response)
        for path, status in (("/ui/state", 401), ("/ui/nothing.js", 404), ("/ui/..%2fapp.py", 401)):
            async with api.http.get(path) as response:
                assert response.status == status


async def test_the_page_can_be_turned_off(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer) as api:
        for path in ("/", "/ui/main.js", "/ui/state"):
            async with api.http.get(path) as response:
                assert response.status == 404
                error = (await response.json())["error"]
                assert error["code"] == "unknown_url"
                assert "--no-ui" in error["message"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_page_refers_only_to_files_beside_it(name: str) -> None:
    text = (FOLDER / name).read_text()
    urls = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text) if "www.w3.org/2000/svg" not in url]
    assert urls == []
    assert "@import" not in text
    for link in LINKED.findall(text):
        is_route = link in ("docs", "data:,") or link.startswith("#")
        assert is_route or link.removeprefix("ui/").removeprefix("./") in NAMES, link
        assert not link.startswith("/"), "the page works below a path prefix"
    if name == "index.html":
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", text), "the policy forbids inline code"


def test_every_control_of_the_page_has_a_name_and_every_script_finds_its_elements() -> None:
    html = (FOLDER / "index.html").read_text()
    ids = set(re.findall(r'id="([\w-]+)"', html))
    labelled = set(re.findall(r'for="([\w-]+)"', html)) | {"model"}  # its label is around it
    controls = re.findall(r'<(?:textarea|select|input) id="([\w-]+)"([^>]*)>', html)
    assert {name for name, attributes in controls if "aria-label=" not in attributes} <= labelled
    assert set(re.findall(r'aria-(?:controls|labelledby)="([\w-]+)"', html)) <= ids
    made = {"stop-texts"}  # by chat.js
    for name in NAMES:
        used = set(re.findall(r'\$\("([\w-]+)"\)', (FOLDER / name).read_text()))
        assert used <= ids | made, name


async def test_the_summary_has_numbers_and_no_texts(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, has_page=True) as api:
        body = {"messages": [{"role": "user", "content": "secret"}]}
        await asyncio.gather(api.post("/v1/chat/completions", body), play(api, [[5, EOS]], finish_reason="stop"))
        await api.post("/v1/chat/completions", body | {"n": 0, "stop": "secret"})
        stats = EngineStats(num_requests_running=2, bucket_steps={"decode/4": 3}, padding_tokens={"decode": 7})
        api.engine.say(StepOutputs([], stats))
        await api.engine.is_heard()
        state, text = await summary(api)
        assert "secret" not in text
        assert state["numbers"]["running"] == 2
        assert state["numbers"]["padding_tokens"] == 7
        assert state["steps"] == {"decode 4": 3}
        assert state["times"]["time_to_first_token"]["count"] == 1
        assert state["engine"]["max_model_len"] == MAX_MODEL_LEN
        assert [(one["route"], one["status"], one["param"]) for one in state["refused"]] == [
            ("POST /v1/chat/completions", 400, "n")
        ]


async def test_the_summary_has_failed_requests_and_streams_but_no_probes(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve")
    async with running_api(tokenizer, has_page=True) as api:
        for is_streamed in (False, True):

            async def ask(is_streamed: bool = is_streamed) -> str:
                body = {"prompt": "x", "stream": is_streamed}
                async with api.http.post("/v1/completions", json=body) as response:
                    return await response.text()

            asked = asyncio.create_task(ask())
            request = await api.engine.added()
            if is_streamed:
                api.engine.output(request, [35])
            api.engine.output(request, [], finish_reason="error")
            assert "error" in await asked
        state, _ = await summary(api)
        assert [(one["route"], one["status"]) for one in state["refused"]] == [("POST /v1/completions", 500)] * 2
    async with running_api(tokenizer, has_page=True, is_ready=False) as api:
        for path in ("/health", "/ready"):
            async with api.http.get(path) as response:
                assert response.status == 503
        assert (await api.post("/v1/completions", {"prompt": "x"}))[0] == 503
        state, _ = await summary(api)
        assert [(one["route"], one["status"]) for one in state["refused"]] == [("POST /v1/completions", 503)]
    assert "refused: " not in caplog.text


async def test_the_summary_is_there_before_the_engine(tokenizer: Tokenizer) -> None:
    async with running_api(tokenizer, has_page=True, is_ready=False) as api:
        state, _ = await summary(api)
        assert state["engine"] is None


async def summary(api: Api) -> tuple[dict[str, Any], str]:
    async with api.http.get("/ui/state") as response:
        assert response.status == 200
        return await response.json(), await response.text()
