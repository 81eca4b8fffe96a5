"""Choice of a model's quantisation: its format, its parameters, and the matrices that stay plain."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.quant.format import Format
from jaxserve.quant.names import NO_QUANTIZATION
from jaxserve.quant.registry import find_format
from jaxserve.quant.stored_blocks import StoredKinds


@dataclass(frozen=True, slots=True)
class QuantPolicy:
    """The quantisation of a model's matrices."""

    name: str = NO_QUANTIZATION
    """The format's name."""
    group_size: int | None = None
    """Inputs that share a scale in the checkpoint, or a multiple of them; None: as the format chooses."""
    has_offsets: bool = False
    """True if groups have an offset as well as a scale."""
    plain_matrices: tuple[str, ...] = ()
    """Modules that are not quantised, by their names in checkpoints, nor is what they are fused with."""
    stored_kinds: StoredKinds = ()
    """Block types of matrices in a GGUF file, by their modules' names in checkpoints, for formats that keep blocks."""
    is_stored: bool = False
    """True if matrices are served as the checkpoint stores them."""
    platform: str = "gpu"
    """The device's platform: a format may store another dtype on some."""

    @property
    def format(self) -> Format:
        return find_format(self.name)
