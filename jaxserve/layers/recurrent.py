"""Common parts of recurrent mixers: their interface in three parts, their state, and their short convolution."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxserve_kernels.linear_attention import PooledStates
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.short_conv import short_conv
from jaxtyping import Array, Float

from jaxserve.layers.linear import Tokens
from jaxserve.layers.param import FusedLayout, parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.sharding.rules import AxisRules


class RecurrentState(NamedTuple):
    """The state of one layer for each row of a step, in the order of `RecurrentConfig.arrays`, or for some of it a pool with it."""

    windows: Float[Array, "B W1 C"]
    """Last inputs of the convolution, the oldest first."""
    states: Float[Array, "B N H V"] | PooledStates | None = None
    """State of linear attention, in float32; None in layers without it. A kernel updates it in its pool."""


Parameters = tuple[Any, ...]
"""Parameters of `RecurrentMixer.recur`: arrays whose first axis is that of heads or channels, or None."""


@runtime_checkable  # arguments are checked in tests
class RecurrentMixer(Protocol):
    """A mixer in three parts, so that a step can compute states again from what they depend on (`mixers.PendingStates`), and
    devices can hold the states of different requests and heads."""

    rules: AxisRules
    head_axis: str | None
    """Logical axis of heads and channels, the last one of what `project` returns and the second one of what `recur` does; None:
    every device has all of them."""

    takes_tokens_in_turn: bool
    """True if `recur` updates states token by token for any number of tokens of a row, if segments have no whole chunks. The kernel then
    gives the bits of decode steps; what XLA computes before it, such as the lengths of queries and keys, may round otherwise on CPUs."""

    @property
    def parameters(self) -> Parameters:
        """The parameters of `recur`."""
        ...

    def project(self, x: Float[Array, "T D"], tokens: Tokens) -> tuple[tuple[Array, ...], Any]:
        """Return what the states depend on, arrays `[T, C]`, and what else `finish` takes."""
        ...

    def recur(
        self, parameters: Parameters, inputs: tuple[Array, ...], state: RecurrentState, segments: Segments
    ) -> tuple[Float[Array, "T ..."], RecurrentState]:
        """Return what is read from the states for each token, and the state after each row's last token, for one device's heads."""
        ...

    def finish(self, made: Float[Array, "T ..."], rest: Any, tokens: Tokens) -> Float[Array, "T D"]:
        """Return the mixer's outputs."""
        ...


class DepthwiseConv(nnx.Module):
    """The parameters of a causal convolution of each channel over the last tokens, with torch's `Conv1d` names."""

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

    @property
    def parameters(self) -> tuple[Array, Array | None]:
        """The taps and the bias."""
        return self.weight[...], None if self.bias is None else self.bias[...]


def convolve(
    taps: Float[Array, "C 1 W"],
    bias: Float[Array, "C"] | None,
    x: Float[Array, "T C"],
    windows: Float[Array, "B W1 C"],
    segments: Segments,
) -> tuple[Float[Array, "T C"], Float[Array, "B W1 C"]]:
    """Return each token's sum in float32, and the windows after each row's last token."""
    with jax.named_scope("short_conv"):
        out, windows = short_conv(x, taps[:, 0], windows, segments)
        return (out if bias is None else out + bias.astype(jnp.float32)), windows
