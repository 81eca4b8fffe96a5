"""Products of activations with output-major weights."""

from jaxserve_kernels.matmul.api import matmul, quantize_rows

__all__ = ["matmul", "quantize_rows"]
