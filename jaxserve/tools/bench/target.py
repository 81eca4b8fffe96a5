"""Where requests go and what stands in each: the differences between OpenAI-compatible servers.

Every request asks for greedy tokens, a stream, usage at its end, and exactly `max_tokens` of them
(`ignore_eos`). The last two are not OpenAI's oldest fields, and strict servers refuse what they do not know:
`settle` finds out with one small request and leaves such fields away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp

from jaxserve.tools.bench.prompts import Form, Prompt

Backend = Literal["openai-chat", "openai"]
"""Names of `vllm bench serve`: chat completions, or completions."""

ENDPOINTS: Mapping[Backend, str] = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}
FORMS: Mapping[Backend, Form] = {"openai-chat": "chat", "openai": "text"}
REFUSABLE_FIELDS = ("stream_options", "ignore_eos")
REFUSALS = (400, 422)


class BenchmarkError(Exception):
    """The run cannot start: no server, no model, or a server that refuses the requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One endpoint of one server."""

    url: str
    """Without a slash at its end."""
    endpoint: str
    model: str
    form: Form
    extra_body: Mapping[str, Any]
    """Fields set in every request, over ours; None takes a field out."""
    omitted_fields: tuple[str, ...] = ()
    """Fields that the server refused."""

    def body(self, prompt: Prompt) -> dict[str, Any]:
        return self._complete(prompt.body, prompt.num_output_tokens)

    def probe_body(self) -> dict[str, Any]:
        """The smallest request."""
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
    """`target` without the fields that its server refuses. Raises BenchmarkError when it refuses more than those."""
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
