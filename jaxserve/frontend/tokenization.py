"""The model's tokenizer and output format, and encoding and decoding in threads, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from jaxserve.errors import ContextLengthError, UnavailableError
from jaxserve.frontend.checks import check_token_ids
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.sampling.params import OPTIONS
from jaxserve.tokenizer.score_prompts import encode_score_pairs
from jaxserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

NUM_THREADS = 4
_IDS_AT_ONCE: Final = 512
"""Token ids that are checked on the event loop; a request has up to --max-prompts lists of them."""
_IDS_OF_A_PART: Final = 8192
"""Token ids that are checked without giving up the interpreter's lock: less than a millisecond."""


class Tokenization:
    """The tokenizer in a small thread pool. It is installed once the model is found; requests wait for `Ready`."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self._executor = executor
        self._tokenizer: Tokenizer | None = None
        self._output_format = OutputFormat()
        self._marker_ids: dict[bool, frozenset[int]] = {}

    def install(self, tokenizer: Tokenizer, output_format: OutputFormat) -> None:
        """Set the model's tokenizer and output format; called once, while the engine starts."""
        self._tokenizer = tokenizer
        self._output_format = output_format
        self._marker_ids = {
            with_tools: tokenizer.control_tokens.in_texts(output_format.markers(with_tools=with_tools))
            for with_tools in (False, True)
        }

    def shown_token_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Return the control tokens that must have a text because a parser reads them."""
        return self._marker_ids[with_tools]

    @property
    def output_format(self) -> OutputFormat:
        """The format of the model's replies."""
        return self._output_format

    @property
    def is_installed(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UnavailableError("The model is loading.")
        return self._tokenizer

    async def check_token_ids(self, param: str, lists: Sequence[list[Any]], vocab_size: int) -> None:
        """Raise InvalidRequestError for anything but ids of this vocabulary. Many are checked in a thread, part by part."""

        def check() -> None:
            for ids in lists:
                for start in range(0, len(ids), _IDS_OF_A_PART):
                    check_token_ids(param, ids[start : start + _IDS_OF_A_PART], vocab_size)

        if sum(map(len, lists)) <= _IDS_AT_ONCE:
            check()
        else:
            await self.call(check)

    async def encode_start(self, text: str, max_tokens: int) -> list[int]:
        """Return the first `max_tokens` token ids of a plain text."""
        return await self.call(lambda: self.tokenizer.encode_cut(text, max_tokens, add_special_tokens=False))

    async def encode_inputs(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        truncate: int | None,
        max_tokens: int,
        param: str,
    ) -> list[list[int]]:
        """Return the token ids of texts to embed, cut to `truncate` tokens; the caller checks the lengths.

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
            return await self.call(lambda: tokenizer.encode_batch(texts, add_special_tokens))
        return await self.call(
            lambda: [tokenizer.encode_cut(text, truncate, add_special_tokens=add_special_tokens) for text in texts]
        )

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        truncate: int | None,
        check: Callable[[int, int], None],
        instruction: str | None = None,
        prompt: str = "",
    ) -> list[tuple[list[int], int | None]]:
        """Return the token ids of pairs of texts, cut to `truncate` tokens, and the start of each second text.

        check: is called with the number of tokens and the place of each pair; its error ends the work. instruction: the system message
        of a chat template for pairs. prompt: see `encode_score_pairs`.
        """
        tokenizer = self.tokenizer

        def encode() -> Iterator[tuple[list[int], int | None]]:
            for place, (ids, start) in enumerate(encode_score_pairs(tokenizer, pairs, truncate, instruction, prompt)):
                check(len(ids), place)
                yield ids, start

        return await self.call(lambda: list(encode()))

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

        return await self.call(encode)

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return await self.call(lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    async def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; equal tokens share one string."""

        def spell() -> list[str]:
            texts = {token_id: self.tokenizer.token_text(token_id) for token_id in set(token_ids)}
            return [texts[token_id] for token_id in token_ids]

        return await self.call(spell)

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


@contextlib.contextmanager
def tokenization() -> Iterator[Tokenization]:
    """Yield a `Tokenization` with its thread pool."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize") as executor:
        yield Tokenization(executor)
