"""What the scheduler knows of grammars: a mask for the next token, that takes some time to make after the last one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from jaxserve.ipc.messages import Grammar


class GrammarState(Protocol):
    """Where one request stands in its grammar. All but `is_ready` mean something once it is ready."""

    @property
    def is_ready(self) -> bool: ...

    def take_jump_forward(self) -> list[int]:
        """Tokens that have to come next, before the one that the mask is for; told once."""
        ...

    @property
    def mask(self) -> np.ndarray:
        """The tokens that may come next, int32 `[W]`."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nothing may come any more."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        ...

    def advance(self, token: int) -> None:
        """Take the token that was chosen; returns at once."""
        ...

    def wait(self, seconds: float) -> None:
        """Until it is ready, but no longer than this."""
        ...


class Grammars(Protocol):
    """Starts to follow a grammar."""

    def follow(
        self, grammar: Grammar, allowed_token_ids: Collection[int], *, jump_forward: bool = False
    ) -> GrammarState: ...
