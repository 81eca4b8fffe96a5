"""The parts of a tokenizer, independent of the checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Parts of a tokenizer, made by `hf_vocab` or `gguf_vocab` for `Tokenizer`."""

    origin: str
    """File or directory, for error messages."""
    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """All tokens that end a generation, the tokenizer's EOS first."""
    special_tokens: Mapping[str, str]
    """Variables of chat templates: `{"bos_token": "<s>", ...}`."""
    chat_templates: Mapping[str, str]
    """Jinja source by name: "default", and "tool_use" for requests with tools."""
