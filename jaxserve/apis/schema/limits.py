"""Sizes of what no setting changes. What a setting does is in `bounds.py`, beside the fields."""

from __future__ import annotations

MAX_ECHOED_CHARS = 200
"""Characters of the client's own input that an error message repeats."""
MAX_SALT_CHARS = 256
MAX_REQUEST_ID_CHARS = 128
