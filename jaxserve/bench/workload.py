"""What a benchmark sends: named mixes of prompt and output lengths, drawn from one seed.

    chat      128-token prompts, 64 out                              -> chat completions
    prefix    1,070-token prompts of which about 1,040 are common, 32 out -> chat completions
    prefill   1,500-token prompts, 16 out                            -> chat completions
    mixed     48 to 1,024-token prompts, 16 to 128 out               -> chat completions
    custom    --input-len and --output-len, random token ids         -> completions

Chat prompts are random common words; the server's own `/tokenize` counts them, template included, so that
their length is exact for whatever model is served. `custom` sends token ids, which are exact by themselves;
the ids are those of common words, so no control token is among them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

WorkloadName = Literal["chat", "prefix", "prefill", "mixed", "custom"]
Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    """Leading tokens of the prompt, roughly, that all requests have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """How requests are made; `lengths` draws the sizes of one."""

    name: WorkloadName
    endpoint: Endpoint
    prompt_range: tuple[int, int]
    output_range: tuple[int, int]
    num_shared_tokens: int = 0

    def lengths(self, chance: random.Random) -> Lengths:
        """Sizes drawn evenly from the ranges."""
        return Lengths(
            num_prompt_tokens=chance.randint(*self.prompt_range),
            num_output_tokens=chance.randint(*self.output_range),
            num_shared_tokens=self.num_shared_tokens,
        )


PRESETS: tuple[Workload, ...] = (
    Workload(name="chat", endpoint="chat", prompt_range=(128, 128), output_range=(64, 64)),
    Workload(name="prefix", endpoint="chat", prompt_range=(1070, 1070), output_range=(32, 32), num_shared_tokens=1040),
    Workload(name="prefill", endpoint="chat", prompt_range=(1500, 1500), output_range=(16, 16)),
    Workload(name="mixed", endpoint="chat", prompt_range=(48, 1024), output_range=(16, 128)),
    Workload(name="custom", endpoint="completions", prompt_range=(128, 128), output_range=(64, 64)),
)


def make_workload(name: WorkloadName, *, num_prompt_tokens: int | None, num_output_tokens: int | None) -> Workload:
    """A preset, with its lengths replaced where given."""
    (preset,) = [workload for workload in PRESETS if workload.name == name]
    prompt_range = (num_prompt_tokens, num_prompt_tokens) if num_prompt_tokens else preset.prompt_range
    return Workload(
        name=name,
        endpoint=preset.endpoint,
        prompt_range=prompt_range,
        output_range=(num_output_tokens, num_output_tokens) if num_output_tokens else preset.output_range,
        num_shared_tokens=min(preset.num_shared_tokens, prompt_range[0] * 9 // 10),
    )


def random_words(chance: random.Random, count: int) -> str:
    """`count` common words. Most tokenizers spend one token on each."""
    return " ".join(chance.choices(WORDS, k=count))


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
