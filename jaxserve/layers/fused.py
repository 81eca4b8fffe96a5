"""Matmuls of one input that checkpoints store apart: queries, keys and values (QKV); gate and up.

GPUs compute them as one matmul with the rows of all: fewer launches, and more rows for the multiprocessors to share.
CPUs keep them apart, because splitting a result costs a copy there; a native kernel computes them in one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.linear import ExpertLowRank, ExpertRows, Linear, LowRank, Tokens, apply_together
from jaxserve.layers.param import FusedLayout
from jaxserve.layers.policy import DtypePolicy


class Matmul(Protocol):
    """A `Linear` or an `ExpertLinear`."""

    def __call__(self, x: Array, rows: Any, /) -> Array:
        """Return the matmul of all rows."""

    def low_rank(self, out_dim: int, num_ranks: int) -> LowRank | ExpertLowRank:
        """Declare adapters of a part of the outputs."""

    def with_outputs(self, out_dim: int) -> Matmul:
        """Return a matmul like this one with another number of outputs."""


class FusedLinear(nnx.Module):
    """A matmul for each name, or one `fused` matmul of all.

    No parameter's name contains it: checkpoints have its matrices where the model has it.
    """

    def __init__(
        self, counts: Mapping[str, int], make: Callable[[int], Matmul], policy: DtypePolicy, *, num_units: int
    ) -> None:
        """counts: outputs by name. make: returns a module with that many outputs. num_units: units that devices split,
        such as KV heads, equally many in each matrix."""
        self.names = tuple(counts)
        self.layout = FusedLayout(tuple(counts.values()), math.gcd(num_units, policy.fused_for))
        self.is_fused = policy.fused_for > 0
        self.adapters: nnx.Dict[LowRank | ExpertLowRank] = nnx.Dict()
        """Adapters of parts of the fused matmul, by name."""
        if self.is_fused:
            self.fused = make(sum(counts.values()))
            return
        for name, count in counts.items():
            setattr(self, name, make(count))

    def separate(self) -> None:
        """Compute a matmul for each name, as if the policy fused none."""
        for name, count in zip(self.names, self.layout.counts, strict=True):
            setattr(self, name, self.fused.with_outputs(count))
        del self.fused
        self.is_fused = False

    def adapt(self, name: str, num_ranks: int) -> None:
        """Declare the adapters of a part of the fused matmul."""
        self.adapters[name] = self.fused.low_rank(self.layout.counts[self.names.index(name)], num_ranks)

    def __call__(self, x: Float[Array, "T I"], rows: Tokens | ExpertRows) -> list[Float[Array, "T _"]]:
        """Return the matmul with each matrix, in the order of their names. rows: the modules' second argument."""
        if not self.is_fused:
            return self._apart(x, rows)
        parts = self.layout.split(self.fused(x, rows))
        if not self.adapters:
            return parts
        return [self._adapted(name, part, x, rows) for name, part in zip(self.names, parts, strict=True)]

    def _apart(self, x: Float[Array, "T I"], rows: Any) -> list[Float[Array, "T _"]]:
        modules = [getattr(self, name) for name in self.names]
        if all(isinstance(module, Linear) for module in modules):
            return apply_together(modules, x, rows)
        return [module(x, rows) for module in modules]

    def _adapted(self, name: str, part: Float[Array, "T _"], x: Float[Array, "T I"], rows: Any) -> Float[Array, "T _"]:
        return part + self.adapters[name](x, rows).astype(part.dtype) if name in self.adapters else part
