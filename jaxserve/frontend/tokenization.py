"""Templates, encoding and decoding, off the event loop.

A text that cannot fit the context is refused by its length, before a tokenizer sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxserve.apis.schema.common import context_error
from jaxserve.errors import ContextLengthError, UnavailableError
from jaxserve.frontend.checks import check_token_ids
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.sampling.params import OPTIONS
from jaxserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

NUM_THREADS = 4


class Tokenization:
    """The tokenizer behind a small thread pool. It is installed once the model is found; requests wait for `Ready`."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._tokenizer: Tokenizer | None = None
        self._output_format = OutputFormat()
        self._marker_ids: dict[bool, frozenset[int]] = {}

    def install(self, tokenizer: Tokenizer, output_format: OutputFormat) -> None:
        """Called once, while the engine starts."""
        self._tokenizer = tokenizer
        self._output_format = output_format
        self._marker_ids = {
            with_tools: tokenizer.special_tokens_in(output_format.markers(with_tools=with_tools))
            for with_tools in (False, True)
        }

    def shown_token_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Control tokens that must have a text, since a parser has to see them."""
        return self._marker_ids[with_tools]

    @property
    def output_format(self) -> OutputFormat:
        """How the model's replies are read."""
        return self._output_format

    @property
    def is_installed(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UnavailableError("The model is loading.")
        return self._tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int, param: str) -> list[int]:
        """Ids of a plain prompt. Raises ContextLengthError when nothing of `max_tokens` is left for output."""
        self._check_length(len(text), max_tokens, param)
        token_ids = await self._call(lambda: self.tokenizer.encode(text, add_special_tokens))
        return _checked(token_ids, max_tokens, param)

    async def encode_start(self, text: str, max_tokens: int) -> list[int]:
        """Ids of a plain text, of which everything behind `max_tokens` is left out."""
        return await self._call(lambda: self.tokenizer.encode_cut(text, max_tokens, add_special_tokens=False))

    async def encode_inputs(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        truncate: int | None,
        max_tokens: int,
        param: str,
    ) -> list[list[int]]:
        """Ids of texts that nothing is written behind, cut to `truncate` tokens; the caller checks what is left.

        Raises ContextLengthError for a text that cannot fit whatever its tokens are.
        """
        if not texts:
            return []
        tokenizer = self.tokenizer
        for text in texts:
            at_least = -(-len(text) // tokenizer.longest_token_chars)
            if truncate is None and at_least > max_tokens:
                raise ContextLengthError(
                    f"This model's maximum context length is {max_tokens} tokens. However, a text of '{param}' has at least "
                    f"{at_least} tokens. Please reduce its length.",
                    param=param,
                )
        if truncate is None:
            return await self._call(lambda: tokenizer.encode_batch(texts, add_special_tokens))
        return await self._call(
            lambda: [tokenizer.encode_cut(text, truncate, add_special_tokens=add_special_tokens) for text in texts]
        )

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncate: int | None
    ) -> list[tuple[list[int], int | None]]:
        """Ids of pairs of texts, cut to `truncate` tokens, and where the second begins; the caller checks what is left."""
        tokenizer = self.tokenizer
        return await self._call(lambda: [tokenizer.encode_pair(one, other, truncate) for one, other in pairs])

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]],
        template_variables: dict[str, Any],
        continue_final_message: bool,
        max_tokens: int,
    ) -> list[int]:
        """Ids of a conversation; the template brings the special tokens."""
        self._check_length(sum(map(_num_chars, messages)), max_tokens, "messages")
        token_ids = await self._call(
            lambda: self.tokenizer.encode_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                template_variables=template_variables,
                continue_final_message=continue_final_message,
            )
        )
        return _checked(token_ids, max_tokens, "messages")

    async def encode_words(self, options: object) -> dict[str, list[tuple[int, ...]]]:
        """Return the token ids of all options that hold words, by option; `options` has them as attributes."""
        held = {name: getattr(options, name) for name, option in OPTIONS.items() if option.holds == "words"}
        return {name: await self._encode_words(words) for name, words in held.items() if words}

    async def _encode_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Encode every word as at the start of a text and as after a space, each distinct result once."""
        variants = dict.fromkeys(text for word in words for text in (word.lstrip() or word, f" {word.lstrip()}"))

        def encode() -> list[tuple[int, ...]]:
            encoded = (tuple(self.tokenizer.encode(text, False)) for text in variants)
            return [ids for ids in dict.fromkeys(encoded) if ids]

        return await self._call(encode)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._call(lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    def check_ids(self, token_ids: list[Any], vocab_size: int, max_tokens: int, param: str) -> list[int]:
        """Token ids given by the client, checked."""
        check_token_ids(param, token_ids, vocab_size)
        return _checked(token_ids, max_tokens, param)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _check_length(self, num_chars: int, max_tokens: int, param: str) -> None:
        at_least = -(-num_chars // self.tokenizer.longest_token_chars)
        if at_least >= max_tokens:
            raise context_error(max_tokens, f"at least {at_least}", param)


def _num_chars(message: dict[str, Any]) -> int:
    content = message["content"]
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


@contextlib.contextmanager
def tokenization() -> Iterator[Tokenization]:
    """A `Tokenization` with its thread pool."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize") as executor:
        yield Tokenization(executor)


def _checked(token_ids: list[int], max_tokens: int, param: str) -> list[int]:
    if len(token_ids) >= max_tokens:
        raise context_error(max_tokens, str(len(token_ids)), param)
    return token_ids
