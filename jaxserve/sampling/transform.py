"""The device half of an option: a function on the rows of a batch, and the state that slots keep for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxserve.sampling.bits import num_words
from jaxserve.sampling.params import SlotInit

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class StateField:
    """An array that a slot keeps for its request. Several options may share one."""

    name: str
    shape: tuple[int | Literal["V", "W"], ...]
    """V: tokens of the vocabulary; W: words of one bit per token."""
    initial: Callable[[SlotInit, int], Any]
    """Return the first values for a request (and the size of the vocabulary), as numpy takes them."""
    dtype: Literal["int32", "float32"] = "int32"
    after_token: Callable[[Array, Int[Array, "B"]], Array] | None = None
    """Return the new values `[B, ...]` from the old ones and each row's new token. Every row of every step pays for
    it, so only a few words may have one."""
    increment: int = 0
    """Added to the entry of each row's new token, in a field of shape `(V,)`."""

    def dims(self, vocab_size: int) -> tuple[int, ...]:
        letters = {"V": vocab_size, "W": num_words(vocab_size)}
        return tuple(letters[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True, eq=False)
class Transform(Generic[P, R]):
    """A function on the rows of a batch, called as its stage says, with the option's column and its state at the end.

    Rows in which the option has its default must come out as they went in, to the bit; their state is undefined.
    """

    function: Callable[P, R]
    state: tuple[StateField, ...] = ()
    is_active: Callable[..., Bool[Array, "B"]] | None = None
    """Narrows the rows in which the option does anything, from `(num_known [B], *state)`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def stateful(
    *state: StateField, is_active: Callable[..., Bool[Array, "B"]] | None = None
) -> Callable[[Callable[P, R]], Transform[P, R]]:
    """Declare the state that a function reads: its last arguments, in this order."""
    return lambda function: Transform(function, state, is_active)


def padded(values: Any, shape: tuple[int, ...], fill: float) -> np.ndarray:
    """Return an array of this shape, of int32 or float32 as `fill` is, with `values` at its start and `fill` after."""
    array = np.full(shape, fill, np.int32 if isinstance(fill, int) else np.float32)
    array[: len(values)] = values
    return array
