"""The interface of grammars: a mask for the next token, which takes some time to make."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from jaxserve.ipc.messages import Grammar


class GrammarState(Protocol):
    """The state of one request's grammar. All but `is_ready` is valid once it is ready."""

    @property
    def is_ready(self) -> bool: ...

    def take_jump_forward(self) -> list[int]:
        """Return the only tokens that may come next, before the one that the mask is for. Later calls return none."""
        ...

    @property
    def mask(self) -> np.ndarray:
        """The tokens that may come next, int32 `[W]`."""
        ...

    @property
    def is_terminated(self) -> bool:
        """True if no token may come next."""
        ...

    @property
    def error(self) -> str | None:
        """The reason why the grammar cannot be followed any further."""
        ...

    def advance(self, token: int) -> None:
        """Take the chosen token; returns at once."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, at most `seconds`."""
        ...


class Grammars(Protocol):
    """Starts grammars."""

    def follow(
        self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False
    ) -> GrammarState: ...
