"""The tokenizer of the API process: text to ids and back, and chats to ids.

All methods are thread-safe: nothing changes after construction.

Control tokens in a user's text: in a raw prompt they are control tokens. In a chat only the template makes
control tokens; the text of one in a message is encoded as ordinary text. (A template that joins request strings into
a control token, as in `'<|' + role + '|>'`, is not covered: requests are validated for known roles.) Added tokens that
are not special, such as `<think>`, are recognised everywhere.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.errors import CheckpointError, InvalidRequestError, invalid
from jaxserve.tokenizer.chat_templates import ChatTemplates
from jaxserve.tokenizer.gguf_vocab import read_gguf_tokenizer
from jaxserve.tokenizer.hf_vocab import read_hf_tokenizer
from jaxserve.tokenizer.source import TokenizerSource
from jaxserve.tokenizer.template import ChatTemplate, Message
from jaxserve.tokenizer.text_state import TextState
from jaxserve.tokenizer.token_bytes import token_bytes


class ControlTokens:
    """Control tokens of a vocabulary (special added tokens, such as `<|im_end|>`) and their texts."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        """texts: by token id."""
        self._texts = dict(texts)
        self._ids = {text: token_id for token_id, text in texts.items()}
        self.ids = frozenset(texts)
        # A control token of one character cannot be broken in two.
        breakable = sorted((text for text in texts.values() if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, breakable))) if breakable else None

    def in_texts(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of control tokens whose text occurs in any of `texts`."""
        return frozenset(token_id for token_id, token in self._texts.items() if any(token in text for text in texts))

    def include(self, texts: Iterable[str]) -> bool:
        """Return True if every one of `texts` is a control token."""
        return self._ids.keys() >= set(texts)

    def split(self, text: str) -> tuple[str | int, ...]:
        """Return the text with the ids of its control tokens in their places."""
        if self._pattern is None:
            return (text,) if text else ()
        parts: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            parts += [text[end : match.start()], self._ids[match[0]]]
            end = match.end()
        return tuple(part for part in (*parts, text[end:]) if part != "")

    def broken(self, value: Any, mark: str) -> Any:
        """Return JSON data with `mark` after the first character of every control token in its strings."""
        pattern = self._pattern
        if pattern is None:
            return value
        if isinstance(value, str):
            while pattern.search(value):
                value = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {self.broken(key, mark): self.broken(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item, mark) for item in value]
        return value


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

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`. `add_special_tokens` adds those that the model expects around a prompt (BOS)."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of each text. Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate)."""
        for text in texts:
            _check_unicode(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def encode_cut(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, truncated at its end to at most `max_tokens` including special tokens.

        Raises InvalidRequestError if special tokens leave no space.
        """
        _check_unicode(text)
        room = max_tokens - (self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0)
        if room < 1:
            raise invalid("truncate_prompt_tokens", f"{max_tokens} leaves no room beside the special tokens")
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(room)
        whole = self._backend.post_process(encoding, add_special_tokens=add_special_tokens)
        return list(whole.ids)

    def encode_pair(self, one: str, other: str, max_tokens: int | None) -> tuple[list[int], int | None]:
        """Return the ids of a pair of texts, and the start of the second if the model has token types.

        The longer one is truncated at its end to at most `max_tokens` in all. Raises InvalidRequestError.
        """
        _check_unicode(one)
        _check_unicode(other)
        first, second = self._backend.encode_batch([one, other], add_special_tokens=False)
        if max_tokens is not None:
            room = max_tokens - self._backend.num_special_tokens_to_add(True)
            if room < 2:
                raise invalid("truncate_prompt_tokens", f"{max_tokens} leaves no room beside the special tokens")
            keep = min(len(first), max(room - len(second), room // 2))
            first.truncate(keep)
            second.truncate(room - keep)
        whole = self._backend.post_process(first, second, add_special_tokens=True)
        types = whole.type_ids
        return list(whole.ids), types.index(1) if 1 in types else None

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
        placeholder: str = "",
        images: Sequence[str] = (),
    ) -> list[int]:
        """Return the ids of a chat. No BOS is added: the template writes it. See the module on control tokens.

        `continue_final_message` ends them with the text of the last message and drops what the template adds after it.
        images: the text of each image part; it replaces the `placeholder`, a control token, that the template writes.
        """
        # A mark inside each control token of the request passes through the template and breaks it in two; the
        # text between marks is encoded piece by piece, so no control token can arise from a request.
        mark = _new_mark()
        try:
            data = self.control_tokens.broken([list(messages), list(tools or ()), dict(template_variables or {})], mark)
        except RecursionError as error:
            raise InvalidRequestError("messages or tools are nested too deeply", param="messages") from error
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
            prompt = _with_images(prompt, placeholder, images)
        pieces = self.encode_batch(prompt.split(mark), add_special_tokens=False)
        return [token_id for piece in pieces for token_id in piece]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


def _with_images(prompt: str, placeholder: str, images: Sequence[str]) -> str:
    """Return the prompt with the texts of images in their places; no message can hold a placeholder."""
    first, *rest = prompt.split(placeholder)
    if len(rest) != len(images):
        raise InvalidRequestError(
            f"The chat template shows {len(rest)} of {len(images)} images: the model takes them in other messages.",
            param="messages",
        )
    return first + "".join(text + after for text, after in zip(images, rest, strict=True))


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


def _with_chat_template(source: TokenizerSource, path: Path) -> TokenizerSource:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: chat template cannot be read: {error}") from error
    ChatTemplate(text, str(path))  # so that an error names the file, not the checkpoint
    return replace(source, chat_templates={"default": text})
