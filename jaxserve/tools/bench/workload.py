"""Workloads of benchmarks: named mixes of prompt and output lengths, and prompts of exactly these lengths.

    chat       128-token prompts, all different, 64 out
    prefix     1,056-token prompts with the first 1,024 in common, 32 out
    prefill    1,500-token prompts, all different, 16 out
    long       8,000-token prompts, all different, 16 out
    sharegpt   lengths of ShareGPT conversations: many short, few long
    custom     --input-len and --output-len

Prompts are random common words. Their length counts everything the model reads, chat template included, and is made
exact by adding and removing words. The prompts of a run depend only on the seed, the run's name and the tokenizer. Runs
of different names share no prefix, so that no run hits another's entries in the server's prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxserve.tools.bench.tokens import TokenizeError, TokenSource


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number of tokens."""

    num_tokens: int

    def draw(self, chance: random.Random) -> int:
        del chance
        return self.num_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """A log-normal number of tokens; values outside the limits are drawn again."""

    median: float
    """Median without the limits."""
    sigma: float
    """Standard deviation of the logarithm."""
    least: int
    most: int

    def draw(self, chance: random.Random) -> int:
        while True:
            value = round(chance.lognormvariate(math.log(self.median), self.sigma))
            if self.least <= value <= self.most:
                return value


Length = Fixed | LogNormal

WorkloadName = Literal["chat", "prefix", "prefill", "long", "sharegpt", "custom"]

# ShareGPT's means are those of 1,000 of its first turns as `vllm bench serve` reports them: 229,711 tokens in,
# 203,068 out (vllm-project/vllm, pull request 18566), cut to 4..1,024 tokens as that tool cuts them. No published
# figure fixes the spread: sigma is an assumption, the medians follow from it and the means.
SHAREGPT_PROMPT = LogNormal(median=171.0, sigma=1.4, least=4, most=1024)
SHAREGPT_OUTPUT = LogNormal(median=138.1, sigma=1.2, least=4, most=1024)

PREFIX_OWN_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Lengths of the requests."""

    name: WorkloadName
    prompt: Length
    output: Length
    num_shared_tokens: int = 0
    """Leading tokens that the prompts of a run have in common."""


PRESETS: tuple[Workload, ...] = (
    Workload(name="chat", prompt=Fixed(128), output=Fixed(64)),
    Workload(name="prefix", prompt=Fixed(1056), output=Fixed(32), num_shared_tokens=1024),
    Workload(name="prefill", prompt=Fixed(1500), output=Fixed(16)),
    Workload(name="long", prompt=Fixed(8000), output=Fixed(16)),
    Workload(name="sharegpt", prompt=SHAREGPT_PROMPT, output=SHAREGPT_OUTPUT),
    Workload(name="custom", prompt=Fixed(128), output=Fixed(64)),
)


def make_workload(
    name: WorkloadName, *, num_prompt_tokens: int | None = None, num_output_tokens: int | None = None
) -> Workload:
    """Return a preset with the given lengths; a shorter `prefix` prompt keeps 32 tokens that are not shared."""
    (workload,) = [workload for workload in PRESETS if workload.name == name]
    if num_prompt_tokens is not None:
        shared = min(workload.num_shared_tokens, max(0, num_prompt_tokens - PREFIX_OWN_TOKENS))
        workload = replace(workload, prompt=Fixed(num_prompt_tokens), num_shared_tokens=shared)
    if num_output_tokens is not None:
        workload = replace(workload, output=Fixed(num_output_tokens))
    return workload


WORDS: tuple[str, ...] = tuple(
    """time year people way day man thing woman life child world school state family student group country problem
    hand part place case week company system program question work government number night point home water room
    mother area money story fact month lot right study book eye job word business issue side kind head house service
    friend father power hour game line end member law car city community name president team minute idea body
    information back parent face others level office door health person art war history party result change morning
    reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan
    college interest death experience effect use class control field development role effort rate heart drug show
    leader light voice wife police mind price report decision son view relationship town road arm difference value
    building action season society tax director position player record paper space ground form event official matter
    center couple site project activity star table need court oil situation cost industry figure street image phone
    data picture practice piece land product doctor wall patient worker news test movie north love step""".split()
)

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
