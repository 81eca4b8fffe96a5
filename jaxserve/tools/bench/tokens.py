"""Gets the token ids of prompts as the server reads them, from the server or from a tokenizer on disk.

Three sources, tried in this order:
- `--tokenizer PATH`, a GGUF file or a Hugging Face directory: works for every server;
- `/tokenize` of jaxserve and vLLM;
- `/tokenize` and `/apply-template` of llama.cpp's llama-server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer.tokenizer import Tokenizer, load_tokenizer

Messages = Sequence[Mapping[str, str]]


class TokenizeError(Exception):
    """The tokens of a prompt cannot be counted, or no prompt has the wanted length."""


class TokenSource(Protocol):
    """Source of the token ids that a server would read. Raises TokenizeError."""

    @property
    def name(self) -> str: ...

    async def chat_ids(self, messages: Messages) -> list[int]:
        """Return the ids of the rendered chat with the generation prompt."""
        ...

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. add_special_tokens: with the BOS, if the model has one."""
        ...


class LocalTokens:
    """A tokenizer in this process."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name

    async def chat_ids(self, messages: Messages) -> list[int]:
        try:
            return await asyncio.to_thread(self._tokenizer.encode_chat, messages)
        except InvalidRequestError as error:
            raise TokenizeError(f"{self.name}: {error.message}") from error

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)


class ServerTokens:
    """Token ids from `/tokenize` with `prompt` or `messages`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/tokenize"
        self._model = model
        self.name = self._url

    async def chat_ids(self, messages: Messages) -> list[int]:
        return await self._ids({"messages": messages})

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await self._ids({"prompt": text, "add_special_tokens": add_special_tokens})

    async def _ids(self, body: dict[str, Any]) -> list[int]:
        return _token_ids(await _post(self._session, self._url, {"model": self._model, **body}), self._url)


class LlamaServerTokens:
    """Token ids from `/tokenize` with `content`; chats are rendered by `/apply-template` first."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._template_url = f"{url}/apply-template"
        self._url = f"{url}/tokenize"
        self.name = self._url

    async def chat_ids(self, messages: Messages) -> list[int]:
        reply = await _post(self._session, self._template_url, {"messages": messages})
        if not isinstance(reply, dict) or not isinstance(reply.get("prompt"), str):
            raise TokenizeError(f"{self._template_url} answered without `prompt`")
        # The server removes a BOS from the rendered template and adds it while encoding.
        return await self.text_ids(reply["prompt"], add_special_tokens=True)

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        body = {"content": text, "add_special": add_special_tokens, "parse_special": True}
        return _token_ids(await _post(self._session, self._url, body), self._url)


async def find_tokens(
    session: aiohttp.ClientSession, url: str, model: str, *, tokenizer: Path | None = None
) -> TokenSource:
    """Return the source for a server. Raises TokenizeError, or CheckpointError for a bad `tokenizer`."""
    if tokenizer is not None:
        return LocalTokens(await asyncio.to_thread(load_tokenizer, tokenizer), str(tokenizer))
    reasons = []
    for source in (ServerTokens(session, url, model), LlamaServerTokens(session, url)):
        try:
            if await source.text_ids("time", add_special_tokens=False):
                return source
        except TokenizeError as error:
            reasons.append(str(error))
    why = reasons[0] if reasons else f"{url}/tokenize finds no tokens in a word"
    raise TokenizeError(f"{why}; name the model's GGUF file or directory with --tokenizer")


async def _post(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                raise TokenizeError(f"{url} answered {response.status}: {(await response.text())[:200]}")
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise TokenizeError(f"{url}: {type(error).__name__}: {error}") from error


def _token_ids(reply: Any, url: str) -> list[int]:
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    if not isinstance(tokens, list):
        raise TokenizeError(f"{url} answered without `tokens`")
    return tokens
