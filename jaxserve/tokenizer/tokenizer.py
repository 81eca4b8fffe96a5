"""The tokenizer of the API process: text to ids and back, and chats to ids.

All methods are thread-safe: nothing changes after construction.

Of the library's methods only those for batches free the interpreter's lock while they encode: `encode` holds it for 1.4 s per
megabyte. They hold it while they take their texts, and so do lists of ids while they are made and freed. So no call gets more
than a few hundred texts, no list is made of a text that is too long, and of a text that is cut only the beginning is encoded: an
event loop beside this thread goes on.

Control tokens in a user's text: in a raw prompt they are control tokens. In a chat only the template makes
control tokens; the text of one in a message is encoded as ordinary text. (A template that joins request strings into
a control token, as in `'<|' + role + '|>'`, is not covered: requests are validated for known roles.) Added tokens that
are not special, such as `<think>`, are recognised everywhere.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

from tokenizers import Encoding

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.errors import CheckpointError, InvalidRequestError, invalid
from jaxserve.tokenizer.chat_templates import ChatTemplates
from jaxserve.tokenizer.control_tokens import ControlTokens
from jaxserve.tokenizer.detokenizer import TextState
from jaxserve.tokenizer.gguf_vocab import read_gguf_eos_token_ids, read_gguf_tokenizer
from jaxserve.tokenizer.hf_vocab import read_hf_eos_token_ids, read_hf_tokenizer
from jaxserve.tokenizer.source import TokenizerSource
from jaxserve.tokenizer.template import ChatTemplate, Message
from jaxserve.tokenizer.token_bytes import token_bytes

_TEXTS_AT_ONCE: Final = 256
"""Number of texts that one call of the library encodes."""
_LARGE_BYTES: Final = 1 << 20
"""Longer texts are first counted in windows: most of them are far too long, and few tokens of those are encoded."""
_WINDOW_CHARS: Final = 256 << 10
_MARGIN_CHARS: Final = 16 << 10
_MARGIN_TOKENS: Final = 4096
"""Tokens before the end of a beginning that what follows it may change."""


class TooManyTokensError(Exception):
    """A text has more tokens than its caller takes."""

    def __init__(self, num_tokens: int, *, is_exact: bool = True) -> None:
        """is_exact: False if the text has at least `num_tokens`."""
        super().__init__(f"{num_tokens} tokens")
        self.num_tokens = num_tokens
        self.is_exact = is_exact


class Tokenizer:
    """A vocabulary, its encoder, its control tokens and its chat templates."""

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_bytes = token_bytes(source.backend, source.origin)
        added = source.backend.get_added_tokens_decoder()
        self.control_tokens = ControlTokens(
            {token_id: token.content for token_id, token in added.items() if token.special}
        )
        self.chat_templates = ChatTemplates(source)
        self.bos_token_id = source.bos_token_id
        self.eos_token_ids = source.eos_token_ids
        """All tokens that end a generation, the tokenizer's EOS first."""
        mask = source.backend.encode("a").special_tokens_mask
        self.num_tokens_before_text = mask.index(0) if 0 in mask else len(mask)
        """Number of tokens that `add_special_tokens` puts before a text (BOS)."""
        self.vocab_size = source.backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens; the model may have more rows."""
        self.max_token_id = len(self._token_bytes.table) - 1
        longest = max(map(len, self._token_bytes.table), default=1) or 1
        self.longest_token_chars = longest if self._token_bytes.is_lossless else sys.maxsize
        """Characters of the longest token: a text longer than this times the context cannot fit."""

    @property
    def eos_token_id(self) -> int | None:
        """EOS of the tokenizer."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the ids of `text`. `add_special_tokens` adds those that the model expects around a prompt (BOS).

        Raises TooManyTokensError for more than `max_tokens`, and InvalidRequestError as `encode_batch` does.
        """
        return self._encode_joined([text], add_special_tokens, max_tokens)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text. Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate)."""
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens)]

    def _encode_joined(self, texts: Iterable[str], add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        """Return the ids of texts, one text after the other. Raises as `encode` does."""
        ids: list[int] = []
        num_tokens = 0
        for encoding in self._encodings(texts, add_special_tokens, max_tokens):
            num_tokens += len(encoding)
            if max_tokens is None or num_tokens <= max_tokens:
                ids += encoding.ids
        if max_tokens is not None and num_tokens > max_tokens:
            raise TooManyTokensError(num_tokens)
        return ids

    def _encodings(
        self, texts: Iterable[str], add_special_tokens: bool, max_tokens: int | None = None
    ) -> Iterator[Encoding]:
        """Yield the encodings of texts. Raises as `encode` does, before it encodes a large text of far too many tokens."""
        rest = iter(texts)
        while batch := list(islice(rest, _TEXTS_AT_ONCE)):
            for text in batch:
                num_bytes = _num_bytes(text)
                if max_tokens is not None and num_bytes > max(max_tokens, _LARGE_BYTES):
                    self._check_windows(text, max_tokens)
            yield from self._backend.encode_batch_fast(batch, add_special_tokens=add_special_tokens)

    def _check_windows(self, text: str, max_tokens: int) -> None:
        """Raise TooManyTokensError if the windows of a text have more than twice `max_tokens`.

        A token at the border of two windows may be counted as two, so the text has more than `max_tokens` itself.
        """
        num_tokens = 0
        for start in range(0, len(text), _WINDOW_CHARS):
            [encoding] = self._backend.encode_batch_fast(
                [text[start : start + _WINDOW_CHARS]], add_special_tokens=False
            )
            num_tokens += len(encoding)
            if num_tokens > 2 * max_tokens:
                raise TooManyTokensError(max_tokens, is_exact=False)

    def encode_cut(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, truncated at its end to at most `max_tokens` including special tokens.

        Raises InvalidRequestError if special tokens leave no space.
        """
        room = max_tokens - (self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0)
        if room < 1:
            raise invalid("truncate_prompt_tokens", f"{max_tokens} leaves no room beside the special tokens")
        encoding = self._beginning(text, room)
        if not add_special_tokens:
            return encoding.ids[:room]
        encoding.truncate(room)
        return self._backend.post_process(encoding, add_special_tokens=True).ids

    def _beginning(self, text: str, num_tokens: int) -> Encoding:
        """Return the encoding of a beginning of `text`, whose first `num_tokens` tokens are those of the whole.

        What follows the beginning may change tokens before it, but not as many as it has more. Raises InvalidRequestError.
        """
        _num_bytes(text)
        num_chars = 4 * num_tokens + _MARGIN_CHARS
        while True:
            [encoding] = self._backend.encode_batch_fast([text[:num_chars]], add_special_tokens=False)
            if num_chars >= len(text) or len(encoding) >= num_tokens + _MARGIN_TOKENS:
                return encoding
            num_chars *= 2

    def encode_pairs(
        self, pairs: Iterable[tuple[str, str]], max_tokens: int | None
    ) -> Iterator[tuple[list[int], int | None]]:
        """Yield the ids of pairs of texts, and the start of each second one if the model has token types.

        A first text that follows itself is encoded once. The longer text of a pair is truncated at its end to at most
        `max_tokens` in all. Raises InvalidRequestError.
        """

        def encoded(text: str) -> Encoding:
            if max_tokens is not None:
                return self._beginning(text, max_tokens)
            return next(self._encodings([text], add_special_tokens=False))

        last: tuple[str, Encoding] | None = None
        for one, other in pairs:
            if last is None or last[0] != one:
                last = one, encoded(one)
            first, second = Encoding.merge([last[1]], growing_offsets=False), encoded(other)  # a copy, to be truncated
            if max_tokens is not None:
                room = max_tokens - self._backend.num_special_tokens_to_add(True)
                if room < 2:
                    raise invalid("truncate_prompt_tokens", f"{max_tokens} leaves no room beside the special tokens")
                keep = min(len(first), max(room - len(second), room // 2))
                first.truncate(keep)
                second.truncate(room - keep)
            whole = self._backend.post_process(first, second, add_special_tokens=True)
            types = whole.type_ids
            yield list(whole.ids), types.index(1) if 1 in types else None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, with U+FFFD for malformed UTF-8. Ids outside the vocabulary have no text."""
        state = self.text_state(skip_special_tokens=skip_special_tokens)
        return "".join(map(state.push, token_ids)) + state.flush()

    def text_state(self, *, skip_special_tokens: bool, shown_token_ids: frozenset[int] = frozenset()) -> TextState:
        """Return the state of a new streamed text; `shown_token_ids` are never skipped."""
        skipped = self.control_tokens.ids - shown_token_ids if skip_special_tokens else frozenset()
        return TextState(self._token_bytes, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the raw bytes of one token; empty outside the vocabulary."""
        return self._token_bytes.table[token_id] if 0 <= token_id <= self.max_token_id else b""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token; `bytes:\\xf0\\x9f` if it is not whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        placeholders: Sequence[str] = (),
        images: Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the ids of a chat. No BOS is added: the template writes it. See the module on control tokens.

        `continue_final_message` ends them with the text of the last message and drops what the template adds after it.
        images: the text of each image or video part; it replaces that one of the `placeholders` which the template writes for it, or
        which is a line of its own if the template reads texts only.
        Raises TooManyTokensError for more than `max_tokens`, and InvalidRequestError.
        """
        # A mark inside each control token of the request passes through the template and breaks it in two; the
        # text between marks is encoded piece by piece, so no control token can arise from a request.
        mark = _new_mark()
        try:
            data = self.control_tokens.broken([list(messages), list(tools or ()), dict(template_variables or {})], mark)
        except RecursionError as error:
            raise InvalidRequestError("messages or tools are nested too deeply", param="messages") from error
        for placeholder in set(placeholders):
            if not self.control_tokens.include([placeholder]):
                data = ControlTokens({0: placeholder}).broken(data, mark)
        if images and not self.chat_templates.read_parts(has_tools=bool(tools)):
            given = iter(placeholders)
            data[0] = [_with_placeholders(message, given) for message in data[0]]
        end = _new_mark()
        if continue_final_message:
            data[0][-1] = _with_end(data[0][-1], end)
        prompt = self.chat_templates.render(
            data[0], add_generation_prompt=add_generation_prompt, tools=data[1], template_variables=data[2]
        )
        if continue_final_message:
            prompt, found, _ = prompt.rpartition(end)
            if not found:
                raise InvalidRequestError(
                    "continue_final_message: the chat template does not show the last message", param="messages"
                )
        if images:
            prompt = _with_images(prompt, placeholders, images)
        return self._encode_joined(_pieces(prompt, mark), False, max_tokens)


def _pieces(text: str, mark: str) -> Iterator[str]:
    """Yield the parts of a text between its marks: `text.split(mark)`, one after the other."""
    start = 0
    while (end := text.find(mark, start)) >= 0:
        yield text[start:end]
        start = end + len(mark)
    yield text[start:]


def _num_bytes(text: str) -> int:
    """Return the size of a text in UTF-8. Raises InvalidRequestError for a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


def _with_placeholders(message: Message, placeholders: Iterator[str]) -> Message:
    """Return the message with the next of the texts in the places of its images and videos."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "text", "text": next(placeholders)} if part.get("type") in ("image", "video") else part
        for part in content
    ]
    return {**message, "content": parts}


def _with_images(prompt: str, placeholders: Sequence[str], images: Sequence[str]) -> str:
    """Return the prompt with the texts of images in their places; no message can hold one of the placeholders."""
    pattern = "|".join(map(re.escape, sorted(set(placeholders), key=len, reverse=True)))
    found = re.findall(pattern, prompt)
    if found != list(placeholders):
        shown = (
            f"{len(found)} of {len(images)} images"
            if len(found) != len(images)
            else "images and videos in another order"
        )
        raise InvalidRequestError(
            f"The chat template shows {shown}: the model takes them in other messages.", param="messages"
        )
    texts = iter(images)
    return re.sub(pattern, lambda _: next(texts), prompt)


def _new_mark() -> str:
    """Return a text that no request can guess and no template changes."""
    return "\ufdd0" + "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))


def _with_end(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + mark}]}


def load_tokenizer(path: Path, *, chat_template: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory or a GGUF file.

    `chat_template` replaces the checkpoint's own templates. Raises CheckpointError in one line.
    """
    if path.is_dir():
        source = read_hf_tokenizer(path)
    elif path.exists():
        source = read_gguf_tokenizer(open_gguf(path).metadata, str(path))
    else:
        raise CheckpointError(f"{path}: expected a Hugging Face directory or a GGUF file, found nothing")
    if chat_template is not None:
        source = _with_chat_template(source, chat_template)
    return Tokenizer(source)


def load_eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the `eos_token_ids` of the tokenizer that `load_tokenizer` loads, in a fraction of the time.

    A directory without a tokenizer has those of its configs. Raises CheckpointError in one line.
    """
    if path.is_dir():
        return read_hf_eos_token_ids(path)
    return read_gguf_eos_token_ids(open_gguf(path).metadata, str(path))


def _with_chat_template(source: TokenizerSource, path: Path) -> TokenizerSource:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: chat template cannot be read: {error}") from error
    ChatTemplate(text, str(path))  # so that an error names the file, not the checkpoint
    return replace(source, chat_templates={"default": text})
