"""Errors of the chat machinery in the words of an API that calls the same fields by other names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from jaxserve.errors import RequestError

Names = Sequence[tuple[re.Pattern[str], str]]
"""What a chat request calls a field, and what the request of the other API calls it."""


@contextlib.contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Errors raised inside name fields as the other API does."""
    try:
        yield
    except RequestError as error:
        for ours, theirs in names:
            error.message = ours.sub(theirs, error.message)
            error.param = ours.sub(theirs, error.param) if error.param is not None else None
        raise
