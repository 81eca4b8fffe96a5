"""Matmuls with weights in the blocks of GGUF files."""

from jaxserve_kernels.block_matmul.api import (
    block_matmul,
    block_matmuls,
    dequantize,
    dequantize_rows,
    dequantize_tiles,
    grouped_block_matmul,
)

__all__ = ["block_matmul", "block_matmuls", "dequantize", "dequantize_rows", "dequantize_tiles", "grouped_block_matmul"]
