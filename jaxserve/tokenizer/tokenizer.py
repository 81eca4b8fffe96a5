"""THE tokenizer of the API process: text to ids and back, and chats to ids.

All methods are thread-safe: nothing changes after construction.

Control tokens spelled out by a user: in a raw prompt they are control tokens, as everywhere else. In a
chat only the template makes control tokens; a message that spells one is encoded as ordinary text.
(A template that glues request strings into a control token, as in `'<|' + role + '|>'`, is not covered:
roles are checked where requests are validated.) Added tokens that are not special, such as `<think>`, are
recognised everywhere.
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
from jaxserve.tokenizer.gguf_vocab import read_gguf_tokenizer
from jaxserve.tokenizer.hf_vocab import read_hf_tokenizer
from jaxserve.tokenizer.source import TokenizerSource
from jaxserve.tokenizer.template import ChatTemplate, Message
from jaxserve.tokenizer.text_state import TextState
from jaxserve.tokenizer.token_bytes import token_bytes


class Tokenizer:
    """A vocabulary, its encoder, and its chat templates."""

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._token_bytes = token_bytes(source.backend, source.origin)
        self.named_tokens = dict(source.special_tokens)
        """Text by role, as chat templates know them: `{"bos_token": "<s>", ...}`."""
        self._templates = {
            name: ChatTemplate(text, f"{source.origin} ({name})") for name, text in source.chat_templates.items()
        }
        added = source.backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_tokens = special
        self._special_ids = {text: token_id for token_id, text in special.items()}
        self.special_token_ids = frozenset(special)
        """Control tokens: they have no text when special tokens are skipped."""
        # A control token of one character cannot be broken in two.
        spellings = sorted((text for text in special.values() if len(text) > 1), key=len, reverse=True)
        self._special_spelling = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self.bos_token_id = source.bos_token_id
        self.eos_token_ids = source.eos_token_ids
        """Every token that ends a generation, the tokenizer's own EOS first."""
        self.vocab_size = source.backend.get_vocab_size(with_added_tokens=True)
        """How many tokens there are; the model may have more rows."""
        self.max_token_id = len(self._token_bytes.table) - 1
        longest = max(map(len, self._token_bytes.table), default=1) or 1
        self.longest_token_chars = longest if self._token_bytes.is_lossless else sys.maxsize
        """No token stands for more characters: longer texts than this times the context cannot fit."""

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own EOS."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. `add_special_tokens` adds what the model expects around a plain prompt (BOS)."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Ids of each text. Raises InvalidRequestError for text that is not valid Unicode (a lone surrogate)."""
        for text in texts:
            _check_unicode(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def encode_cut(self, text: str, max_tokens: int, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`, cut at its end so that there are at most `max_tokens` with those around it.

        Raises InvalidRequestError when these leave no room.
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
        """Ids of two texts as the model expects them, and where the second begins, if the model tells them apart.

        The longer one is cut at its end so that there are at most `max_tokens`. Raises InvalidRequestError.
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
        """The text of `token_ids`; U+FFFD stands for malformed UTF-8. Ids outside the vocabulary have no text."""
        state = self.text_state(skip_special_tokens=skip_special_tokens)
        return "".join(map(state.push, token_ids)) + state.flush()

    def text_state(self, *, skip_special_tokens: bool, shown_token_ids: frozenset[int] = frozenset()) -> TextState:
        """A new growing text, for streaming; `shown_token_ids` have a text in any case."""
        skipped = self.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
        return TextState(self._token_bytes, skipped)

    def special_tokens_in(self, texts: Sequence[str]) -> frozenset[int]:
        """The control tokens that are spelled in any of `texts`."""
        return frozenset(
            token_id for token_id, token in self._special_tokens.items() if any(token in text for text in texts)
        )

    def has_control_tokens(self, tokens: Iterable[str]) -> bool:
        """Whether each of these is a control token."""
        return self._special_ids.keys() >= set(tokens)

    def with_control_tokens(self, text: str) -> tuple[str | int, ...]:
        """The text with its control tokens as ids."""
        if self._special_spelling is None:
            return (text,) if text else ()
        parts: list[str | int] = []
        end = 0
        for match in self._special_spelling.finditer(text):
            parts += [text[end : match.start()], self._special_ids[match[0]]]
            end = match.end()
        return tuple(part for part in (*parts, text[end:]) if part != "")

    @property
    def chat_template_sources(self) -> tuple[str, ...]:
        """The templates as text, for whoever wants to know the family."""
        return tuple(template.source for template in self._templates.values())

    @property
    def chat_template_source(self) -> str | None:
        """The template of chats without tools."""
        template = self._find_template(has_tools=False)
        return None if template is None else template.source

    @property
    def takes_tools(self) -> bool:
        """Whether there is a template with a place for tools."""
        template = self._find_template(has_tools=True)
        return template is not None and template.takes_tools

    def template_reads(self, variable: str, *, has_tools: bool = False) -> bool:
        """Whether the template of such a chat reads a variable; False when there is no template."""
        template = self._find_template(has_tools=has_tools)
        return template is not None and variable in template.variables

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token; empty outside the vocabulary."""
        return self._token_bytes.table[token_id] if 0 <= token_id <= self.max_token_id else b""

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; `bytes:\\xf0\\x9f` when it is not whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat.

        `template_variables` (a request's `chat_template_kwargs`) are variables the template may read; names
        that it already has are refused. Raises InvalidRequestError.
        """
        template = self._template(has_tools=bool(tools))
        variables = dict(template_variables or {})
        for name in variables:
            if name in template.reserved_names or name in self.named_tokens or not name.isidentifier():
                raise InvalidRequestError(
                    f"chat_template_kwargs: {name[:64]!r} is not a variable that a request may set",
                    param="chat_template_kwargs",
                )
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=self.named_tokens | variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The ids of a chat. No BOS is added: the template writes it. See the module for spelled control tokens.

        `continue_final_message` ends them with the text of the last message, whatever the template puts behind it.
        """
        # The mark travels through the template inside each spelled control token and breaks it in two; the
        # text is encoded piece by piece between marks, so no control token can arise from a request.
        mark = _new_mark()
        try:
            data = self._broken([list(messages), list(tools or ()), dict(template_variables or {})], mark)
        except RecursionError as error:
            raise InvalidRequestError("messages or tools are nested too deeply", param="messages") from error
        end = _new_mark()
        if continue_final_message:
            data[0][-1] = _with_end(data[0][-1], end)
        prompt = self.render_chat(
            data[0], add_generation_prompt=add_generation_prompt, tools=data[1], template_variables=data[2]
        )
        if continue_final_message:
            prompt, found, _ = prompt.rpartition(end)
            if not found:
                raise InvalidRequestError(
                    "continue_final_message: the chat template does not show the last message", param="messages"
                )
        pieces = self.encode_batch(prompt.split(mark), add_special_tokens=False)
        return [token_id for piece in pieces for token_id in piece]

    def _find_template(self, *, has_tools: bool) -> ChatTemplate | None:
        return self._templates.get("tool_use" if has_tools and "tool_use" in self._templates else "default")

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        template = self._find_template(has_tools=has_tools)
        if template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template",
                param="messages",
            )
        return template

    def _broken(self, value: Any, mark: str) -> Any:
        """`value` with `mark` after the first character of every control token spelled in its strings."""
        spelling = self._special_spelling
        if spelling is None:
            return value
        if isinstance(value, str):
            while spelling.search(value):
                value = spelling.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {self._broken(key, mark): self._broken(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(item, mark) for item in value]
        return value


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error


def _new_mark() -> str:
    """A text that no request can guess and no template changes."""
    return "\ufdd0" + "".join(chr(0xE000 + secrets.randbelow(0x1900)) for _ in range(4))


def _with_end(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A message whose content ends with `mark`."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + mark}
    *parts, last = content
    return {**message, "content": [*parts, {**last, "text": last["text"] + mark}]}


def load_tokenizer(path: Path, *, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a GGUF file.

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
    ChatTemplate(text, str(path))  # a mistake in it is the file's, not the checkpoint's
    return replace(source, chat_templates={"default": text})
