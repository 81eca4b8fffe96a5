"""Public entry of the short convolution. Letters: B rows, T tokens, C channels, W taps."""

from __future__ import annotations

from jaxtyping import Array, Float

from jaxserve_kernels.segments import Segments
from jaxserve_kernels.short_conv import reference


def short_conv(
    x: Float[Array, "T C"],
    weight: Float[Array, "C W"],
    windows: Float[Array, "B W1 C"],
    segments: Segments,
) -> tuple[Float[Array, "T C"], Float[Array, "B W1 C"]]:
    """Return, in float32, each token's sum over itself and the W - 1 tokens before it, and each row's last W - 1 inputs.

    The last tap is the token's own (a depthwise Conv1d with left padding). `windows` holds the inputs before a row's first
    token, the oldest first. Every output adds the same numbers in the same order however its text was divided into steps.
    """
    return reference.short_conv(x, weight, windows, segments)
