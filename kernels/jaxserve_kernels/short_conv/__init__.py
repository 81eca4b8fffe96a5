"""Causal depthwise convolution over a few tokens, with the window carried from step to step."""

from jaxserve_kernels.short_conv.api import short_conv

__all__ = ["short_conv"]
