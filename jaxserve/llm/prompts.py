"""Prompts and sampling parameters of calls of the Python API, one or many, as lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeVar

import numpy as np

from jaxserve.errors import invalid
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, read_array
from jaxserve.llm.sampling_params import SamplingParams

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text or token ids; also vLLM's `{"prompt": "..."}` and `{"prompt_token_ids": [...]}`."""


def listed_prompts(prompts: Prompt | Iterable[Prompt], listed: Callable[[Any, str], T]) -> list[T]:
    """Return each prompt as `listed` makes it from the prompt and its place."""
    if not isinstance(prompts, Iterable):
        raise invalid("prompts", f"must be texts or token ids, got {shorten(prompts)}")
    given: Any = prompts if isinstance(prompts, str | Mapping) else list(prompts)  # a generator is read once
    if isinstance(given, str | Mapping) or (given and all(isinstance(token, Integral) for token in given)):
        return [listed(given, "prompts")]
    return [listed(prompt, f"prompts[{i}]") for i, prompt in enumerate(given)]


def listed_input(prompt: Any, name: str) -> str | list[int] | EmbedsSource:
    """Return a prompt of `generate`, which may be embeddings."""
    if isinstance(prompt, Mapping) and list(prompt) == ["prompt_embeds"]:
        return read_array(prompt["prompt_embeds"], f"{name}.prompt_embeds")
    return listed_prompt(prompt, name)


def listed_prompt(prompt: Any, name: str) -> str | list[int]:
    """Return a prompt as a text or as token ids. Raises InvalidRequestError that names it `name`."""
    content = prompt
    if isinstance(prompt, Mapping) and len(prompt) == 1:
        content = prompt.get("prompt", prompt.get("prompt_token_ids"))
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence | np.ndarray) and all(isinstance(token, Integral) for token in content):
        return list(map(int, content))
    raise invalid(name, f"must be a text or token ids, got {shorten(prompt)}")


def params_of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt. Raises InvalidRequestError."""
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    is_list = isinstance(sampling_params, Sequence)
    if not is_list or not all(isinstance(one, SamplingParams) for one in sampling_params):
        raise invalid("sampling_params", f"must be SamplingParams or a list of them, got {shorten(sampling_params)}")
    if len(sampling_params) != num_prompts:
        raise invalid(
            "sampling_params", f"must be one, or one for each of the {num_prompts} prompts, got {len(sampling_params)}"
        )
    return sampling_params
