"""An OpenAI-style server whose every figure is known: one word is one token, a message costs five more."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TEMPLATE_TOKENS = 5
MODEL = "fake-model"


def count_tokens(body: dict[str, Any]) -> int:
    if isinstance(body.get("prompt"), list):
        return len(body["prompt"])
    texts = [message["content"] for message in body["messages"]] if "messages" in body else [body["prompt"]]
    overhead = TEMPLATE_TOKENS * len(body.get("messages", ()))
    return sum(len(text.split()) for text in texts) + overhead


@dataclass
class FakeServer:
    """`fail_every` answers each n-th generation with 500; `break_stream` ends streams with an error event."""

    fail_every: int = 0
    break_stream: bool = False
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        count = count_tokens(await request.json())
        return web.json_response({"count": count, "tokens": list(range(100, 100 + count))})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return web.json_response({"error": {"message": "planned failure"}}, status=500)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._stream(request, body)
        finally:
            self._now -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        is_chat = "messages" in body
        if is_chat:
            await self._event(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await response.write(b": keep-alive\n\n")
        for _ in range(body["max_tokens"]):
            choice = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            await self._event(response, {"choices": [choice]})
            await asyncio.sleep(0)
        if self.break_stream:
            await self._event(response, {"error": {"message": "engine gone"}})
            return response
        usage = {
            "prompt_tokens": count_tokens(body),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response: web.StreamResponse, data: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(data)}\n\n".encode())


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Serve from a thread of its own, so that blocking clients can be tested."""
    loop = asyncio.new_event_loop()
    is_up = threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(server.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        is_up.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert is_up.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
