"""Registers `QuantArray` with jax: its arrays are leaves, its format is static. Import before tracing one."""

from __future__ import annotations

import jax

from jaxserve.quant.array import QuantArray

jax.tree_util.register_dataclass(
    QuantArray, data_fields=["values", "scales", "offsets", "matrix_scales"], meta_fields=["format"]
)
