"""The sampling parameters of the Python API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.sampling.params import SamplerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplerOptions[str]):
    """Parameters of a continuation, with vLLM's names and defaults: the sampler's options, stop strings, `n`, formats.

    The values are checked when prompts are there, by the code that checks an HTTP request: the same limits, and the
    same InvalidRequestError naming field and value.
    """

    n: int = 1
    """Continuations of each prompt."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as fit the context."""
    stop: str | Sequence[str] = ()
    """Texts before which a continuation ends."""
    include_stop_str_in_output: bool = False
    """True to keep the text or token that ended it."""
    logprobs: int | None = None
    """None: no log-probabilities; 0: those of the chosen tokens; k: also those of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The log-probabilities wanted for the prompt's tokens, counted as in `logprobs`."""
    return_routed_experts: bool = False
    """True to return the experts that the tokens of prompt and continuation chose; needs the setting
    `enable_return_routed_experts`."""
    skip_special_tokens: bool = True
    """True to leave special tokens out of the text."""
    structured_outputs: Mapping[str, Any] | None = None
    """The format that constrains the text, one of `{"json": schema}`, `{"json_object": True}`, `{"regex": ...}`,
    `{"choice": [...]}` and `{"grammar": ...}` (Lark); see docs/structured-output.md."""

    def request_fields(self) -> dict[str, Any]:
        """Return the fields that are given."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}
