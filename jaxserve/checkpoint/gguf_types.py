"""The GGUF tensor types jaxserve reads, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """How a tensor's elements are stored: `block_elements` of them in `block_bytes`."""

    code: int
    name: str
    block_elements: int
    block_bytes: int


_TYPES = (
    GGMLType(0, "F32", 1, 4),
    GGMLType(1, "F16", 1, 2),
    GGMLType(30, "BF16", 1, 2),
    GGMLType(2, "Q4_0", 32, 18),
    GGMLType(3, "Q4_1", 32, 20),
    GGMLType(6, "Q5_0", 32, 22),
    GGMLType(7, "Q5_1", 32, 24),
    GGMLType(8, "Q8_0", 32, 34),
    GGMLType(10, "Q2_K", 256, 84),
    GGMLType(11, "Q3_K", 256, 110),
    GGMLType(12, "Q4_K", 256, 144),
    GGMLType(13, "Q5_K", 256, 176),
    GGMLType(14, "Q6_K", 256, 210),
)

GGML_TYPES: dict[int, GGMLType] = {kind.code: kind for kind in _TYPES}
"""By the code a GGUF tensor record carries."""

GGML_TYPE_NAMES: dict[str, GGMLType] = {kind.name: kind for kind in _TYPES}
