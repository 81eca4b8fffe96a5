"""Common parts of recurrent mixers: their interface in three parts, their state, and their short convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxserve_kernels.backend import Backend
from jaxserve_kernels.segments import Segments
from jaxserve_kernels.short_conv import short_conv
from jaxserve_kernels.states import PooledStates
from jaxtyping import Array, Float

from jaxserve.layers.linear import Tokens
from jaxserve.layers.param import FusedLayout, parameter
from jaxserve.layers.policy import DtypePolicy
from jaxserve.sharding.rules import AxisRules


class RecurrentState(NamedTuple):
    """The state of one layer for each row of a step, in the order of `RecurrentConfig.arrays`, or pools with it."""

    windows: Float[Array, "B W1 C"] | PooledStates | None
    """Last inputs of the convolution, the oldest first; None in layers without one."""
    states: Float[Array, "B *state"] | PooledStates | None = None
    """State of linear attention or of a selective scan, in float32; None in layers without it. Kernels update both in their
    pools."""


Parameters = tuple[Any, ...]
"""Parameters of `RecurrentMixer.recur`: arrays whose first axis is that of heads or channels, or None. Mixers without a
`head_axis` may have trees of arrays."""


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
    gives the bits of decode steps."""

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

    def finish(self, made: Float[Array, "T ..."], rest: Any, tokens: Tokens) -> Float[Array, "T O"]:
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
    windows: Float[Array, "B W1 C"] | PooledStates | None,
    segments: Segments,
    backend: Backend,
    *,
    sizes: Sequence[int] | None = None,
    is_silu: bool = True,
) -> tuple[list[Float[Array, "T _"]], Float[Array, "B W1 C"] | PooledStates]:
    """Return each token's sums in the type of x, in arrays of `sizes` channels, and the windows after each row's last token."""
    assert windows is not None, "a convolution has a window"
    with jax.named_scope("short_conv"):
        taps = taps[:, 0]
        parts, windows = short_conv(x, taps, bias, windows, segments, sizes=sizes, is_silu=is_silu, backend=backend)
        return [part.astype(x.dtype) for part in parts], windows
