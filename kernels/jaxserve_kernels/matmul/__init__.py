"""Matmuls of activations with output-major weights."""

from jaxserve_kernels.matmul.api import matmul, multiplies, offset_product, quantize_rows

__all__ = ["matmul", "multiplies", "offset_product", "quantize_rows"]
