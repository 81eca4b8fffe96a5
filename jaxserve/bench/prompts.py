"""Makes prompts of exact length with the help of the server's own `/tokenize`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.bench.workload import WORDS, Lengths, Workload, random_words

MAX_CORRECTIONS = 12
FILLER = " a"
"""One token in every tokenizer of the supported families; closes the last gap to the wanted length."""


class TokenizeError(Exception):
    """The server's `/tokenize` is missing or answered something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request, ready to send: `body` lacks only the fields that every request has."""

    path: str
    body: Mapping[str, Any]
    lengths: Lengths


class PromptMaker:
    """Draws prompts for one workload. The same seed gives the same prompts for the same tokenizer."""

    def __init__(self, session: aiohttp.ClientSession, *, url: str, model: str, workload: Workload, seed: int) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._workload = workload
        self._chance = random.Random(seed)
        self._shared = random_words(random.Random(seed), workload.num_shared_tokens)

    async def make(self, count: int) -> list[Prompt]:
        """`count` prompts. Raises TokenizeError."""
        if self._workload.endpoint == "completions":
            pool = await self._tokenize({"prompt": " " + " ".join(WORDS), "add_special_tokens": False})
            return [self._ids_prompt(pool) for _ in range(count)]
        return [await self._chat_prompt() for _ in range(count)]

    def _ids_prompt(self, pool: list[int]) -> Prompt:
        lengths = self._workload.lengths(self._chance)
        token_ids = self._chance.choices(pool, k=lengths.num_prompt_tokens)
        return Prompt(path="/v1/completions", body={"prompt": token_ids}, lengths=lengths)

    async def _chat_prompt(self) -> Prompt:
        """Words are added or taken until the template plus text has the wanted number of tokens."""
        lengths = self._workload.lengths(self._chance)
        wanted = lengths.num_prompt_tokens
        words = random_words(self._chance, wanted).split()
        num_words, num_fillers = wanted - lengths.num_shared_tokens, 0
        for _ in range(MAX_CORRECTIONS):
            messages = self._messages(" ".join(words[:num_words]) + FILLER * num_fillers)
            missing = wanted - len(await self._tokenize({"messages": messages}))
            if missing == 0:
                return Prompt(path="/v1/chat/completions", body={"messages": messages}, lengths=lengths)
            if missing > 0:
                num_fillers += missing
            elif num_words > 1:
                num_words = max(1, num_words + missing)
            else:
                break
        raise TokenizeError(f"cannot make a chat prompt of {wanted} tokens: the template alone takes most of them")

    def _messages(self, text: str) -> list[dict[str, str]]:
        user = {"role": "user", "content": text}
        return [{"role": "system", "content": self._shared}, user] if self._shared else [user]

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        async with self._session.post(f"{self._url}/tokenize", json={"model": self._model, **body}) as response:
            if response.status != 200:
                raise TokenizeError(f"{self._url}/tokenize answered {response.status}: {(await response.text())[:200]}")
            reply = await response.json()
        if not isinstance(reply, dict) or not isinstance(reply.get("tokens"), list):
            raise TokenizeError(f"{self._url}/tokenize answered without `tokens`")
        return list(reply["tokens"])
