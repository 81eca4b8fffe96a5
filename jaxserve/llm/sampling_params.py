"""The sampling options of the Python API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt, under vLLM's names and with its defaults.

    This is neither `sampling.params.SamplingParams`, which an engine gets, nor a request body, but what both say
    together: the engine knows tokens alone, so stop strings, `n` and the text's form never reach it, and its words
    are token ids that only a tokenizer can make. The values are checked by the code that checks those of an HTTP
    request, when prompts are there: the same limits, and the same InvalidRequestError naming field and value.
    """

    n: int = 1
    """Continuations of each prompt."""
    max_tokens: int | None = 16
    """None: as many as the context has room for."""
    min_tokens: int = 0
    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: drawn from the LLM's own `seed`, another one for each prompt."""
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    """None: no log-probabilities; 0: of the chosen tokens; k: and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    logprob_token_ids: Sequence[int] | None = None
    """Tokens to tell of in the place of the most likely ones; needs `logprobs`."""
    skip_special_tokens: bool = True
    structured_outputs: Mapping[str, Any] | None = None
    """What the text is held to, one of `{"json": schema}`, `{"json_object": True}`, `{"regex": ...}`, `{"choice": [...]}`
    and `{"grammar": ...}` (Lark); see docs/structured-output.md."""

    def request_fields(self) -> dict[str, Any]:
        """The fields of a request body that ask for the same, but for `logprobs`, which endpoints spell differently."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["logprobs"]
        return {name: value for name, value in values.items() if value is not None}
