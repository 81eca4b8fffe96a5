"""Common parts of recurrent mixers: their interface in three parts, their state, and their short convolution."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.short_conv import short_conv
from jaxtyping import Array, Float

from jaxserve.layers.linear import Tokens
from jaxserve.layers.param import FusedLayout, parameter
from jaxserve.layers.policy import DtypePolicy


class RecurrentState(NamedTuple):
    """The state of one layer for each row of a step, in the order of `RecurrentConfig.arrays`."""

    windows: Float[Array, "B W1 C"]
    """Last inputs of the convolution, the oldest first."""
    states: Float[Array, "B N H V"] | None = None
    """State of linear attention, in float32; None in layers without it."""


@runtime_checkable  # arguments are checked in tests
class RecurrentMixer(Protocol):
    """A mixer in three parts, so that a step can compute states again from what they depend on (`mixers.PendingStates`)."""

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, ...], Any]:
        """Return what the states depend on, arrays `[T, ...]`, and what else `finish` takes."""
        ...

    def recur(
        self, inputs: tuple[Array, ...], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T ..."], RecurrentState]:
        """Return what is read from the states for each token, and the state after each row's last token."""
        ...

    def finish(self, made: Float[Array, "T ..."], rest: Any, tokens: Tokens) -> Float[Array, "T D"]:
        """Return the mixer's outputs."""
        ...


class DepthwiseConv(nnx.Module):
    """A causal convolution of each channel over the last tokens, with torch's `Conv1d` names."""

    def __init__(
        self,
        num_channels: int,
        num_taps: int,
        policy: DtypePolicy,
        *,
        bias: bool,
        axis: str | None = None,
        layout: FusedLayout | None = None,
    ) -> None:
        """axis: logical axis of the channels. layout: their order, as for `linear.Matrix`."""
        self.weight = parameter((num_channels, 1, num_taps), (axis, None, None), policy.vectors)
        self.bias = parameter((num_channels,), (axis,), policy.vectors) if bias else None
        self.layout = layout

    def __call__(
        self, x: Float[Array, "T C"], windows: Float[Array, "B W1 C"], segments: Segments
    ) -> tuple[Float[Array, "T C"], Float[Array, "B W1 C"]]:
        """Return each token's sum in float32, and the windows after each row's last token."""
        out, windows = short_conv(x, self.weight[...][:, 0], windows, segments)
        return (out if self.bias is None else out + self.bias[...].astype(jnp.float32)), windows
