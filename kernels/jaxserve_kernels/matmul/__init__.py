"""Products of activations with output-major weights."""

from jaxserve_kernels.matmul.api import matmul, multiplies_int8, quantize_rows

__all__ = ["matmul", "multiplies_int8", "quantize_rows"]
