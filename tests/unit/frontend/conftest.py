"""The fixtures of a running application."""

from __future__ import annotations

from tests.unit.running_api import api, messages, tokenizer

__all__ = ["api", "messages", "tokenizer"]
