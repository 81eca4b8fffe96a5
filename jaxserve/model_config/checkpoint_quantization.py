"""Quantisation of a checkpoint, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

KVScaleDtype = Literal["fp8", "int8"]
"""Numbers that scales of a KV cache are for."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """Quantisation of a checkpoint as it is served unless --quantization says otherwise."""

    format: str
    """Format that keeps the stored values; "none" if they are dequantised while they are loaded."""
    plain_matrices: tuple[str, ...] = ()
    """Modules that the checkpoint does not quantise."""
    group_size: int | None = None
    """Inputs that share a scale; None: all of an output."""
    has_offsets: bool = False
    """True if every group has an offset as well as a scale."""
    note: str | None = None
    """Advice for a user who serves the checkpoint as it is."""
    kv_scales: KVScaleDtype | None = None
    """Numbers of the KV cache that the checkpoint has scales for; None: it has none that can be used."""
    stored_kinds: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Modules whose matrices a GGUF file stores in blocks, and ggml's names of their types. Programs of formats that do not keep blocks do not depend on them."""
