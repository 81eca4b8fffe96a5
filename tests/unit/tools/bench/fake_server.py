"""An OpenAI-style server whose every figure is known: a word is a token, a message costs five, a text one more."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

MODEL = "fake-model"
BOS = 0


class Words:
    """The tokenizer."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def ids(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, 10 + len(self._ids)) for word in text.split()]

    def render(self, messages: list[dict[str, str]]) -> str:
        return " ".join(f"<s> {m['role']} <t> {m['content']} </t> </s>" for m in messages)

    def request_ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return self.ids(self.render(body["messages"]))
        return [BOS, *self.ids(body["prompt"])]


@dataclass
class FakeServer:
    """The kind of server."""

    tokenize: Literal["vllm", "llama", "none"] = "vllm"
    refuses: tuple[str, ...] = ()
    """Fields answered with 422."""
    sends_usage: bool = True
    sends_done: bool = True
    forgets_tokenizer: bool = False
    """`/tokenize` fails once something was generated."""
    counts_more: bool = False
    """Usage tells of one prompt token more than `/tokenize`."""
    finishes_early: bool = False
    """One token less than wanted."""
    fail_every: int = 0
    """Each n-th generation is answered 500."""
    break_stream: bool | str = False
    """End streams with an error event: OpenAI's object, or a bare string."""
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Generations but for the small request before the first."""
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    words: Words = field(default_factory=Words)
    _now: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        if self.tokenize != "none":
            app.router.add_post("/tokenize", self._tokenize)
        if self.tokenize == "llama":
            app.router.add_post("/apply-template", self._apply_template)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/elsewhere", self._generate)
        return app

    def lengths(self) -> list[int]:
        """Prompt tokens of what was generated."""
        return [len(self.words.request_ids(body)) for body in self.bodies]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if self.forgets_tokenizer and self.bodies:
            raise web.HTTPInternalServerError
        body = await request.json()
        if self.tokenize == "llama":
            ids = self.words.ids(body.get("content", ""))
            # The template writes a BOS of its own, here `<s>`: adding one more would be wrong.
            if body.get("add_special") and not body["content"].startswith("<s>"):
                ids = [BOS, *ids]
            return web.json_response({"tokens": ids})
        ids = self.words.request_ids(body)
        if "prompt" in body and not body["add_special_tokens"]:
            ids = ids[1:]
        return web.json_response({"count": len(ids), "tokens": ids})

    async def _apply_template(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": self.words.render((await request.json())["messages"])})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if unknown := [name for name in self.refuses if name in body]:
            return web.json_response({"detail": f"Unexpected fields in the request: {unknown}"}, status=422)
        if body.get("prompt") != "hello" and body.get("messages") != [{"role": "user", "content": "hello"}]:
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
        num_tokens = body["max_tokens"] - self.finishes_early
        for _ in range(num_tokens):
            choice = {"delta": {"content": "x "}} if is_chat else {"text": "x "}
            await self._event(response, {"choices": [choice]})
            await asyncio.sleep(0)
        if self.break_stream:
            message = "engine gone"
            await self._event(response, {"error": message if self.break_stream == "text" else {"message": message}})
            return response
        await self._event(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        if self.sends_usage:
            usage = {
                "prompt_tokens": len(self.words.request_ids(body)) + self.counts_more,
                "completion_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": 3},
            }
            await self._event(response, {"choices": [], "usage": usage})
        if self.sends_done:
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
    assert is_up.wait(60)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
