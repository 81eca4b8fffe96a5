"""Templates, encoding and decoding in threads, off the event loop.

A text that cannot fit the context is rejected by its length, before a tokenizer sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from jaxserve.errors import ContextLengthError, UnavailableError, UnsupportedParameterError, unsupported
from jaxserve.frontend.checks import check_token_ids, refuse
from jaxserve.frontend.messages import ChatMessage, template_messages
from jaxserve.frontend.parsers.output_format import OutputFormat
from jaxserve.frontend.request import Conversation, Texts
from jaxserve.frontend.tools import template_tools
from jaxserve.sampling.params import OPTIONS
from jaxserve.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

NUM_THREADS = 4
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Template variables that turn reasoning on and off."""


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

    async def encode_conversation(self, conversation: Conversation, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a conversation; the template brings the special tokens.

        max_tokens: the context, in which something must be left for output. Raises ContextLengthError, and
        UnsupportedParameterError for what the model's template does not read.
        """
        tokenizer, param = self.tokenizer, conversation.names.prompt
        functions = [function for _, function in conversation.offered]
        variables = self._template_variables(conversation, has_tools=bool(functions))
        self._check_length(sum(map(_num_chars, conversation.messages)), max_tokens, param)
        token_ids = await self._call(
            lambda: tokenizer.encode_chat(
                template_messages(conversation.messages),
                add_generation_prompt=(
                    not conversation.continue_final_message and conversation.add_generation_prompt is not False
                ),
                tools=template_tools(functions),
                template_variables=variables,
                continue_final_message=conversation.continue_final_message,
            )
        )
        return _checked(token_ids, max_tokens, param)

    async def encode_texts(self, texts: Texts, vocab_size: int, max_tokens: int) -> list[list[int]]:
        """Return the token ids of prompts given as texts or ids. Raises InvalidRequestError or ContextLengthError."""
        found = []
        for prompt in texts.prompts:
            if isinstance(prompt, str):
                ids = await self.encode(
                    prompt, add_special_tokens=texts.add_special_tokens, max_tokens=max_tokens, param="prompt"
                )
            else:
                check_token_ids("prompt", prompt, vocab_size)
                ids = _checked(prompt, max_tokens, "prompt")
            found.append(ids)
        return found

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None, param: str) -> list[int]:
        """Return the token ids of a plain prompt. Raises ContextLengthError if nothing of `max_tokens` is left for output."""
        self._check_length(len(text), max_tokens, param)
        token_ids = await self._call(lambda: self.tokenizer.encode(text, add_special_tokens))
        return _checked(token_ids, max_tokens, param)

    async def encode_start(self, text: str, max_tokens: int) -> list[int]:
        """Return the first `max_tokens` token ids of a plain text."""
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
            return await self._call(lambda: tokenizer.encode_batch(texts, add_special_tokens))
        return await self._call(
            lambda: [tokenizer.encode_cut(text, truncate, add_special_tokens=add_special_tokens) for text in texts]
        )

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], truncate: int | None
    ) -> list[tuple[list[int], int | None]]:
        """Return the token ids of pairs of texts, cut to `truncate` tokens, and the start of each second text."""
        tokenizer = self.tokenizer
        return await self._call(lambda: [tokenizer.encode_pair(one, other, truncate) for one, other in pairs])

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
        """Return the text of token ids."""
        return await self._call(lambda: self.tokenizer.decode(token_ids, skip_special_tokens))

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _check_length(self, num_chars: int, max_tokens: int | None, param: str) -> None:
        at_least = -(-num_chars // self.tokenizer.longest_token_chars)
        if max_tokens is not None and at_least >= max_tokens:
            raise context_error(max_tokens, f"at least {at_least}", param)

    def _template_variables(self, conversation: Conversation, *, has_tools: bool) -> dict[str, Any]:
        """Return the template's variables. Raises UnsupportedParameterError for what the template does not read."""
        tokenizer, names = self.tokenizer, conversation.names
        if has_tools and not self._output_format.has_tools:
            raise unsupported(
                "tools", "is not supported: it is not known how this model calls tools (--tool-call-parser)"
            )
        if has_tools and not tokenizer.chat_templates.take_tools:
            raise unsupported("tools", "is not supported: the model's chat template has no place for them")

        def is_read(name: str) -> bool:
            return tokenizer.chat_templates.read(name, has_tools=has_tools)

        variables: dict[str, Any] = {}
        effort, thinking = conversation.reasoning_effort, conversation.thinking
        is_switched = effort is not None or thinking is not None
        switches = [name for name in THINKING_SWITCHES if is_switched and is_read(name)]
        if effort is not None:
            if is_read("reasoning_effort"):
                variables["reasoning_effort"] = effort
            variables |= dict.fromkeys(switches, effort != "none")
            if not variables:
                raise _unread(names.reasoning_effort)
        if conversation.documents:
            if not is_read("documents"):
                raise _unread("documents")
            variables["documents"] = conversation.documents
        if thinking is not None:
            if not switches and self._output_format.has_reasoning != thinking:
                raise refuse(f"{names.thinking}={'enabled' if thinking else 'disabled'}")
            variables |= dict.fromkeys(switches, thinking)
        return variables | dict(conversation.template_variables)


def context_error(limit: int, num_prompt_tokens: str, param: str) -> ContextLengthError:
    """Return the error for a prompt that is too long by itself. `num_prompt_tokens` may be "at least N"."""
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {num_prompt_tokens} "
        "input tokens, which leaves no room for output. Please reduce the length of the input prompt.",
        param=param,
    )


def _unread(name: str) -> UnsupportedParameterError:
    return unsupported(name, "is not supported: the model's chat template does not read it")


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)


@contextlib.contextmanager
def tokenization() -> Iterator[Tokenization]:
    """Yield a `Tokenization` with its thread pool."""
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize") as executor:
        yield Tokenization(executor)


def _checked(token_ids: list[int], max_tokens: int | None, param: str) -> list[int]:
    if max_tokens is not None and len(token_ids) >= max_tokens:
        raise context_error(max_tokens, str(len(token_ids)), param)
    return token_ids
