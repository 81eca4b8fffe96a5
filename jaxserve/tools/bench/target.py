"""Endpoint and fields of the requests, for any OpenAI-compatible server.

Every request asks for greedy decoding, a stream with usage at its end, and exactly `max_tokens` tokens (`ignore_eos`).
Strict servers reject fields that they do not know: `settle` finds these with small requests and omits them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from jaxserve.tools.bench.prompts import Form, Prompt

Backend = Literal["openai-chat", "openai"]
"""Chat completions or completions, by the names of `vllm bench serve`."""

ENDPOINTS: Mapping[Backend, str] = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
FORMS: Mapping[Backend, Form] = {"openai-chat": "chat", "openai": "text"}
REFUSABLE_FIELDS = ("stream_options", "ignore_eos")
REFUSALS = (400, 422)


class BenchmarkError(Exception):
    """The run cannot start: no server, no model, or a server that rejects the requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One endpoint of one server."""

    url: str
    """Base URL without a slash at its end."""
    endpoint: str
    model: str
    form: Form
    extra_body: Mapping[str, Any]
    """Fields of every request, over the default ones; None removes a field."""
    omitted_fields: tuple[str, ...] = ()
    """Fields that the server rejected."""

    def body(self, prompt: Prompt) -> dict[str, Any]:
        return self._complete(prompt.body, prompt.num_output_tokens)

    def probe_body(self) -> dict[str, Any]:
        """Return the body of the smallest request."""
        prompt = {"messages": [{"role": "user", "content": "hello"}]} if self.form == "chat" else {"prompt": "hello"}
        return self._complete(prompt, 1)

    def _complete(self, prompt: Mapping[str, Any], num_output_tokens: int) -> dict[str, Any]:
        fields = {
            "model": self.model,
            **prompt,
            "max_tokens": num_output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra_body,
        }
        return {name: value for name, value in fields.items() if value is not None and name not in self.omitted_fields}


async def settle(session: aiohttp.ClientSession, target: Target) -> Target:
    """Return `target` without the fields that its server rejects. Raises BenchmarkError if it rejects the rest too."""
    url = target.url + target.endpoint
    while True:
        try:
            async with session.post(url, json=target.probe_body()) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise BenchmarkError(f"{url}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return target
        refused = [name for name in REFUSABLE_FIELDS if name in text and name in target.probe_body()]
        if response.status not in REFUSALS or not refused:
            raise BenchmarkError(f"{url} answered {response.status} to a small request: {text[:300]}")
        target = replace(target, omitted_fields=(*target.omitted_fields, *refused))
