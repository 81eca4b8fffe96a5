"""The size of a KV page."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import DoesNotFitError


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A cache group with pages: keys and values of its layers, in pages of `block_size` tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    num_arrays: int = 2
    """Keys and values, or 1 for one vector that is both."""
    window: int | None = None
    """Tokens whose pages are kept; None: all."""
    rate: int = 1
    """Tokens for which there is one vector."""

    @property
    def bytes_per_token(self) -> int:
        """Key and value of one token over all layers, its share of those of a page."""
        return -(-self.bytes_per_block // self.block_size)

    @property
    def bytes_per_block(self) -> int:
        """One page over all layers."""
        numbers = self.num_arrays * self.num_layers * self.num_kv_heads * self.head_dim
        return numbers * self.dtype_bytes * -(-self.block_size // self.rate)

    def num_blocks_for(self, num_bytes: int) -> int:
        """Return the pages that fit in `num_bytes`, the null page included."""
        num_blocks = num_bytes // self.bytes_per_block
        if num_blocks < 2:
            raise DoesNotFitError(
                f"--kv-cache-memory of {num_bytes} bytes is too small: "
                f"the model needs at least two pages of {self.bytes_per_block} bytes"
            )
        return num_blocks
