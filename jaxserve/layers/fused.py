"""Products of one input that checkpoints keep apart: queries, keys and values; gate and up.

GPUs compute them as one product with the rows of all: fewer launches, and more rows for the multiprocessors to share.
CPUs compute them one by one, because parting a result again costs a copy there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import LowRank, Matrix, Tokens
from jaxserve.layers.policy import DtypePolicy

Product = Callable[[Array, Any], Array]
"""Of rows with a matrix, as `Linear` or `ExpertLinear`."""


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """How the rows of several matrices lie in one array.

    counts  rows of each
    groups  of rows, each with its share of every matrix in their order: so many devices can split the array, and each
            then holds of every matrix what it would hold of it alone
    """

    counts: tuple[int, ...]
    groups: int = 1

    def join(self, parts: Iterable[Sequence[np.ndarray]]) -> tuple[np.ndarray, ...]:
        """Return the arrays of the fused matrix from those of each matrix; only one of the parts is held at a time."""
        joined: tuple[np.ndarray, ...] = ()
        for (start, end), part in zip(self._bounds(), parts, strict=True):
            joined = joined or tuple(np.empty((sum(self.counts), *each.shape[1:]), each.dtype) for each in part)
            for whole, own in zip(joined, part, strict=True):
                grouped = whole.reshape(self.groups, -1, *whole.shape[1:])
                grouped[:, start:end] = own.reshape(self.groups, -1, *own.shape[1:])
        return joined

    def split(self, y: Float[Array, "T O"]) -> list[Float[Array, "T _"]]:
        """What belongs to each matrix of the product with all of them."""
        grouped = y.reshape(y.shape[0], -1, sum(self.counts) // self.groups)  # a device may hold only one group
        return [grouped[..., start:end].reshape(y.shape[0], -1) for start, end in self._bounds()]

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Of each matrix within a group."""
        return itertools.pairwise(itertools.accumulate((count // self.groups for count in self.counts), initial=0))


class FusedLinear(nnx.Module):
    """A product under each name, or one `joined` of all.

    It stands in no parameter's name: its matrices lie in checkpoints beside each other, where it lies in the model.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        make: Callable[[int], Product],
        policy: DtypePolicy,
        *,
        num_units: int,
    ) -> None:
        """counts: outputs by name. make: a module with so many outputs. num_units: what devices share, as heads, if there
        are as many for each."""
        self.names = tuple(counts)
        self.layout = FusedLayout(tuple(counts.values()), math.gcd(num_units, policy.fused_for))
        self.is_fused = policy.fused_for > 0
        self.adapters: nnx.Dict[LowRank] = nnx.Dict()
        """What adapters add to parts of a joined product, by name."""
        if self.is_fused:
            self.fused = make(sum(counts.values()))
            return
        for name, count in counts.items():
            setattr(self, name, make(count))

    def adapt(self, name: str, num_ranks: int) -> None:
        """Declare what adapters add to a part of the joined product."""
        assert isinstance(self.fused, Matrix), "experts have no adapters"
        spec, out_dim = self.fused.spec, self.layout.counts[self.names.index(name)]
        self.adapters[name] = LowRank(out_dim, spec.in_dim, spec.axes, self.fused.policy, num_ranks)

    def __call__(self, x: Float[Array, "T I"], rows: Tokens | Int[Array, "E"]) -> list[Float[Array, "T _"]]:
        """The product with each matrix, in the order of their names. rows: what the modules are told of them."""
        if not self.is_fused:
            return [getattr(self, name)(x, rows) for name in self.names]
        parts = self.layout.split(self.fused(x, rows))
        if not self.adapters:
            return parts
        return [self._adapted(name, part, x, rows) for name, part in zip(self.names, parts, strict=True)]

    def _adapted(
        self, name: str, part: Float[Array, "T _"], x: Float[Array, "T I"], tokens: Any
    ) -> Float[Array, "T _"]:
        return part + self.adapters[name](x, tokens).astype(part.dtype) if name in self.adapters else part
