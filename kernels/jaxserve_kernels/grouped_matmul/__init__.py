"""Matmuls of rows with the matrix of the expert that each row belongs to."""

from jaxserve_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
