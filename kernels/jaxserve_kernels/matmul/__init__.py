"""Matmuls of activations with output-major weights."""

from jaxserve_kernels.matmul.api import matmul, matmuls, multiplies, offset_matmul, quantize_rows
from jaxserve_kernels.matmul.cpu import takes_inputs

__all__ = ["matmul", "matmuls", "multiplies", "offset_matmul", "quantize_rows", "takes_inputs"]
