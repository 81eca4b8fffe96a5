"""Clients that send requests of all kinds and record how each one ends."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aiohttp

Outcome = Literal["ok", "left", "error event", "refused", "busy", "cut", "silent", "wrong"]
"""ok: answered in full; left: this client went away, as it meant to; error event: a stream that ended with one error; refused:
503, or no connection; busy: 429; cut: the connection broke; silent: no end within TIMEOUT_S; wrong: any other reply."""
TIMEOUT_S: Final = 900.0
"""Longer than any reply takes: a request that is silent for so long is lost, and not slow."""
REQUEST_SPACING_S: Final = 0.25
"""Mean time between two requests of a client."""
SHARED: Final = "You are a helpful assistant in the kitchen of a small restaurant. Answer in one short sentence. " * 4
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "grams": {"type": "integer", "maximum": 999}},
    "required": ["name", "grams"],
    "additionalProperties": False,
}
TOOL: Final = {"type": "function", "function": {"name": "weigh", "parameters": SCHEMA}}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one request."""

    kind: str
    outcome: Outcome
    began_s: float
    ended_s: float
    """Both of `time.monotonic`."""
    detail: str = ""


@dataclass(slots=True)
class Received:
    """The part of a reply that has arrived."""

    began_s: float
    """When the request was sent."""
    status: int | None = None
    first_byte_s: float | None = None
    body: bytearray = field(default_factory=bytearray)

    async def read(self, reply: aiohttp.ClientResponse) -> str:
        """Read the reply to its end; returns its text."""
        self.status = reply.status
        async for chunk in reply.content.iter_any():
            if self.first_byte_s is None:
                self.first_byte_s = time.monotonic()
            self.body += chunk
        return self.body.decode()

    def __str__(self) -> str:
        if self.status is None:
            return "no status"
        first = "" if self.first_byte_s is None else f", the first after {self.first_byte_s - self.began_s:.1f} s"
        return f"status {self.status}, {len(self.body)} bytes{first}"


@dataclass
class Traffic:
    """Requests to one server."""

    url: str
    adapter: str
    ended: list[Ended] = field(default_factory=list)

    async def run(self, num_clients: int, stop_s: float) -> None:
        """Send requests until `time.monotonic` is `stop_s`, and wait for the end of all of them."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            await asyncio.gather(*(self._client(session, random.Random(n), stop_s) for n in range(num_clients)))

    def counts(self) -> dict[str, Counter[str]]:
        """Return the number of requests by kind and outcome."""
        found: dict[str, Counter[str]] = {}
        for each in self.ended:
            found.setdefault(each.kind, Counter())[each.outcome] += 1
        return found

    async def _client(self, session: aiohttp.ClientSession, chance: random.Random, stop_s: float) -> None:
        while time.monotonic() < stop_s:
            kind = chance.choice(list(KINDS))
            received = Received(time.monotonic())
            outcome, detail = await self._outcome(session, kind, chance, received)
            detail = f"{detail} ({received})".lstrip()
            self.ended.append(Ended(kind, outcome, received.began_s, time.monotonic(), detail))
            await asyncio.sleep(chance.expovariate(1 / REQUEST_SPACING_S))

    async def _outcome(
        self, session: aiohttp.ClientSession, kind: str, chance: random.Random, received: Received
    ) -> tuple[Outcome, str]:
        path, body, accepts = KINDS[kind](chance, self.adapter)
        leaves_s = chance.uniform(0.05, 1.0) if kind == "left early" else None
        try:
            async with asyncio.timeout(leaves_s), session.post(f"{self.url}{path}", json=body) as reply:
                text = await received.read(reply)
                if reply.status in (429, 503):
                    return "busy" if reply.status == 429 else "refused", ""
                if reply.status != 200:
                    return "wrong", f"{reply.status} {text[:200]}"
                return stream_outcome(text) if body.get("stream") else accepts(json.loads(text))
        except aiohttp.ClientConnectorError:
            return "refused", ""
        except TimeoutError:
            return ("left", "") if leaves_s is not None else ("silent", "")
        except (aiohttp.ClientError, ConnectionError) as error:
            return "cut", type(error).__name__


def stream_outcome(text: str) -> tuple[Outcome, str]:
    """Return how a stream of server-sent events ended."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return "cut", text[-100:]
    return ("error event" if any('"error"' in event for event in events[-2:]) else "ok"), ""


Request = tuple[str, dict[str, Any], Callable[[Any], tuple[Outcome, str]]]


def _any_reply(reply: Any) -> tuple[Outcome, str]:
    return ("ok", "") if reply["choices"] else ("wrong", str(reply)[:200])


def _follows_schema(reply: Any) -> tuple[Outcome, str]:
    """Check a reply to SCHEMA; one that its limit of tokens has cut short is not whole, and none of the server's faults."""
    choice = reply["choices"][0]
    if choice["finish_reason"] == "length":
        return "ok", ""
    text = choice["message"].get("content") or choice["message"]["tool_calls"][0]["function"]["arguments"]
    try:
        found = json.loads(text)
    except ValueError:
        return "wrong", text[:200]
    return ("ok", "") if set(found) == {"name", "grams"} else ("wrong", text[:200])


def _question(chance: random.Random) -> str:
    things = ("flour", "an egg", "butter", "a lemon", "rice", "a tin of tomatoes")
    return f"How much does {chance.choice(things)} number {chance.randrange(100)} weigh?"


def _chat(chance: random.Random, **options: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": _question(chance)}]
    body = {"messages": messages, "max_tokens": chance.choice([4, 16, 48]), "seed": chance.randrange(1000)}
    return body | options


def _chat_stream(chance: random.Random, adapter: str) -> Request:
    return "/v1/chat/completions", _chat(chance, stream=True), _any_reply


def _chat_whole(chance: random.Random, adapter: str) -> Request:
    return "/v1/chat/completions", _chat(chance, n=chance.choice([1, 1, 2]), logprobs=True, top_logprobs=3), _any_reply


def _adapted(chance: random.Random, adapter: str) -> Request:
    return "/v1/chat/completions", _chat(chance, model=adapter, stream=chance.random() < 0.5), _any_reply


def _schema(chance: random.Random, adapter: str) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "weight", "schema": SCHEMA}}
    return "/v1/chat/completions", _chat(chance, response_format=form, max_tokens=48), _follows_schema


def _tool(chance: random.Random, adapter: str) -> Request:
    return "/v1/chat/completions", _chat(chance, tools=[TOOL], tool_choice="required", max_tokens=64), _follows_schema


def _completion(chance: random.Random, adapter: str) -> Request:
    prompt = [chance.randrange(3, 40_000) for _ in range(chance.choice([1, 17, 64, 300, 700]))]
    options = {"top_p": chance.choice([1.0, 0.9]), "stop": chance.choice([None, ["\n"]]), "max_tokens": 12}
    return "/v1/completions", {"prompt": prompt, "stream": chance.random() < 0.5} | options, _any_reply


def _left_early(chance: random.Random, adapter: str) -> Request:
    return "/v1/chat/completions", _chat(chance, stream=True, max_tokens=400), _any_reply


KINDS: Final[dict[str, Callable[[random.Random, str], Request]]] = {
    "chat, streamed": _chat_stream,
    "chat, whole": _chat_whole,
    "adapter": _adapted,
    "JSON schema": _schema,
    "tool": _tool,
    "completion": _completion,
    "left early": _left_early,
}
"""Each returns the path and body of a request, and a function that judges the reply."""
