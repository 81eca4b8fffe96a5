"""Prompts and sampling parameters of calls of the Python API, one or many, as lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np

from jaxserve.errors import invalid
from jaxserve.frontend.checks import shorten
from jaxserve.frontend.prompt_embeds.prompt import EmbedsSource, read_array
from jaxserve.llm.sampling_params import SamplingParams

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text or token ids; also vLLM's `{"prompt": "..."}` and `{"prompt_token_ids": [...]}`."""
_BYTES: Final = (bytes, bytearray)
"""Sequences of integers that are no token ids."""
_SINGLE: Final = (str, Mapping, *_BYTES)
"""Types of a single prompt, though they can be iterated."""


def check_text(value: object, name: str) -> None:
    """Raise InvalidRequestError for a lone surrogate in texts that go to the engine: JSON of HTTP requests has none."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise invalid(name, f"is not valid Unicode: a lone surrogate at character {error.start} of a text") from None


def listed_prompts(prompts: Prompt | Iterable[Prompt], listed: Callable[[Any, str], T]) -> list[T]:
    """Return each prompt as `listed` makes it from the prompt and its place."""
    if not isinstance(prompts, Iterable):
        raise invalid("prompts", f"must be texts or token ids, got {shorten(prompts)}")
    given: Any = prompts if isinstance(prompts, _SINGLE) else list(prompts)  # a generator is read once
    if isinstance(given, _SINGLE) or (given and all(isinstance(token, Integral) for token in given)):
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
    is_list = isinstance(content, Sequence | np.ndarray) and not isinstance(content, _BYTES)
    if is_list and all(isinstance(token, Integral) for token in content):
        return list(map(int, content))
    raise invalid(name, f"must be a text or token ids, got {shorten(prompt)}")


def listed_texts(texts: Any, name: str) -> list[str]:
    """Return one text or many as a list. Raises InvalidRequestError that names the argument."""
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Iterable):
        raise invalid(name, f"must be a text or a list of texts, got {shorten(texts)}")
    found = list(texts)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise invalid(f"{name}[{i}]", f"must be a text, got {shorten(text)}")
    return found


def listed_conversations(messages: Any) -> list[Any]:
    """Return one conversation or many as a list; their messages are checked later. Raises InvalidRequestError."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise invalid("messages", f"must be a list of messages with a role and a content, got {shorten(messages)}")
    found = list(messages)
    return [found] if found and isinstance(found[0], Mapping) else found


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
