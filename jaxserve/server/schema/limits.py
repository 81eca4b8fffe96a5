"""The largest request this server looks at. Each limit is named in the error of whoever exceeds it."""

from __future__ import annotations

MAX_CHOICES = 128
"""`n`."""
MAX_PROMPTS = 256
"""Prompts in one completions request."""
MAX_SEQUENCES = 1024
"""Prompts times `n`."""
MAX_MESSAGES = 10_000
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
"""Characters of one stop string."""
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
"""Characters of one bad word."""
MAX_TEMPLATE_KWARGS_CHARS = 16_384
"""Characters of `chat_template_kwargs` as JSON."""
MAX_TOOLS = 128
MAX_FUNCTION_CHARS = 65_536
"""Characters of one function's definition as JSON."""
MAX_ECHOED_CHARS = 200
"""Characters of the client's own input that an error message repeats."""
MAX_SALT_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
