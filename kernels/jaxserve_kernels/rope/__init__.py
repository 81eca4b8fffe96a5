"""Rotary position embedding."""

from jaxserve_kernels.rope.reference import Rotation, rotate

__all__ = ["Rotation", "rotate"]
