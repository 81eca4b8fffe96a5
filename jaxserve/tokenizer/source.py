"""What a tokenizer is made of, whatever kind of checkpoint it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Made by `hf_vocab` or `gguf_vocab`, consumed once by `Tokenizer`."""

    origin: str
    """The file or directory, for error messages."""
    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every token that ends a generation; the tokenizer's own EOS first."""
    special_tokens: Mapping[str, str]
    """What a chat template sees as variables: `{"bos_token": "<s>", ...}`."""
    chat_templates: Mapping[str, str]
    """Jinja source by name. "default" is the usual one, "tool_use" serves requests with tools."""
