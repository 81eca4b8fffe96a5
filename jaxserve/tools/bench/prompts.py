"""Makes prompts of an exact number of tokens, chat template included, by adding and removing words.

The prompts of a run depend only on the seed, the run's name and the tokenizer. Runs of different names share no prefix,
so that no run hits another's entries in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.tools.bench.tokens import TokenizeError, TokenSource
from jaxserve.tools.bench.workload import WORDS, Fixed, Workload

Form = Literal["chat", "text"]
"""A list of messages, or plain text."""

MAX_CORRECTIONS = 12
MAX_AT_ONCE = 8
FILLER = " a"
"""One token in every tokenizer of the supported families; fills the last gap to the length."""
FIRST_WORDS = ("time", "year")
"""Two first words, to find the common prefix of prompts that differ after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request; `body` lacks only the fields that all requests share."""

    body: Mapping[str, Any]
    token_ids: Sequence[int]
    num_output_tokens: int


class PromptMaker:
    """Makes the prompts of one workload."""

    def __init__(self, tokens: TokenSource, workload: Workload, form: Form, *, seed: int) -> None:
        self._tokens = tokens
        self._workload = workload
        self._form = form
        self._seed = seed
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def make(self, count: int, *, run: str) -> list[Prompt]:
        """Return `count` prompts of the run with this name. Raises TokenizeError."""
        shared = await self._shared_text(run)
        overhead = len(await self._ids(shared, WORDS[0])) - 1
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._prompt(f"{run}/{i}", shared, overhead)) for i in range(count)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _prompt(self, name: str, shared: str, overhead: int) -> Prompt:
        chance = self._chance(name)
        wanted, num_output_tokens = self._workload.prompt.draw(chance), self._workload.output.draw(chance)
        if not isinstance(self._workload.prompt, Fixed):
            wanted = max(wanted, overhead + 1)  # the template alone is longer than some of the drawn lengths
        async with self._places:
            text, token_ids = await _fill(chance, wanted, overhead, lambda text: self._ids(shared, text))
        return Prompt(body=self._body(shared, text), token_ids=token_ids, num_output_tokens=num_output_tokens)

    async def _shared_text(self, run: str) -> str:
        """Return a text with which the common prefix of the prompts is `num_shared_tokens` long."""
        if not self._workload.num_shared_tokens:
            return ""

        async def common_ids(text: str) -> list[int]:
            one, other = [await self._ids(text, word) for word in FIRST_WORDS]
            return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]

        overhead = len(await common_ids(WORDS[0])) - 1
        text, _ = await _fill(self._chance(run), self._workload.num_shared_tokens, overhead, common_ids)
        return text

    def _chance(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{self._workload.name}/{name}")

    async def _ids(self, shared: str, text: str) -> list[int]:
        if self._form == "chat":
            return await self._tokens.chat_ids(_messages(shared, text))
        return await self._tokens.text_ids(_joined(shared, text), add_special_tokens=True)

    def _body(self, shared: str, text: str) -> dict[str, Any]:
        if self._form == "chat":
            return {"messages": _messages(shared, text)}
        return {"prompt": _joined(shared, text)}


async def _fill(
    chance: random.Random, wanted: int, overhead: int, ids_of: Callable[[str], Awaitable[list[int]]]
) -> tuple[str, list[int]]:
    """Return random words with exactly `wanted` ids, and the ids. overhead: tokens besides the words."""
    words = chance.choices(WORDS, k=max(1, wanted))
    num_words, num_fillers = max(1, wanted - overhead), 0
    for _ in range(MAX_CORRECTIONS):
        text = " ".join(words[:num_words]) + FILLER * num_fillers
        token_ids = await ids_of(text)
        missing = wanted - len(token_ids)
        if missing == 0:
            return text, token_ids
        if missing > 0:
            num_fillers += missing
        elif num_words > 1:
            num_words = max(1, num_words + missing)
        else:
            break
    raise TokenizeError(f"cannot make a prompt of {wanted} tokens: {overhead} are not the prompt's own words")


def _messages(shared: str, text: str) -> list[dict[str, str]]:
    user = {"role": "user", "content": text}
    return [{"role": "system", "content": shared}, user] if shared else [user]


def _joined(shared: str, text: str) -> str:
    return f"{shared}\n{text}" if shared else text
