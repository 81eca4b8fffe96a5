"""Vision towers as data. A family turns the vision part of a checkpoint's `config.json` into a VisionConfig.

An image is cut into square patches; the tower turns them into embeddings of the decoder's width, one for each block of
`merge` x `merge` patches. Patches of an image come block by block, those of a block row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.model_config.activation import Activation

PositionKind = Literal["table", "interpolated"]
"""table: a patch's row and column index a square table of learned positions (SigLIP).
interpolated: the table is stretched bilinearly over the grid of each image (Qwen3-VL)."""
Connector = Literal["linear", "mlp", "average"]
"""From the patches of a block to one embedding.

linear: their vectors side by side, one matrix (SmolVLM). mlp: a LayerNorm of each vector, then two layers over the vectors
side by side (Qwen3-VL). average: their mean, an RMSNorm, one matrix (Gemma 3)."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """Values of pixels as the tower reads them: (value * scale - mean) / deviation, by channel."""

    scale: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """One vision tower and its connector: a pre-norm transformer with attention within each image.

    Letters: P patches, F numbers of a patch, D width, N heads, H head dim, W width of an output row.
    """

    hidden_size: int  # D
    intermediate_size: int
    num_layers: int
    num_heads: int  # N
    patch_size: int
    """Pixels of a patch's side."""
    norm_eps: float
    activation: Activation
    positions: PositionKind
    positions_per_side: int
    """Rows, and columns, of the table of learned positions."""
    connector: Connector
    connector_eps: float
    """Epsilon of the connector's norm."""
    merge: int
    """Patches of a block's side: `merge` ** 2 of them become one embedding."""
    output_size: int
    """Width of an embedding: that of the decoder."""
    normalization: Normalization
    image_token_id: int
    """Token that stands for one embedding in a prompt."""
    num_channels: int = 3
    num_frames: int | None = None
    """Depth of the patch embedding's kernel in a tower that also reads videos; an image is that many equal frames. None: the
    kernel has no such axis."""
    rope_theta: float | None = None
    """Base of the rotation by row and column; None: queries and keys do not rotate."""
    has_final_norm: bool = False
    """True if a LayerNorm follows the last layer."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose outputs, each through a connector of its own, are added to the decoder's first layers at the
    image's tokens (DeepStack, arXiv 2406.04334)."""
    image_patches: int | None = None
    """Patches of an encoder item if all have equally many; None: items differ."""
    mrope_sections: tuple[int, int, int] | None = None
    """Rotary frequencies of the decoder that time, row and column turn (interleaved M-RoPE); None: a token has one position."""
    is_bidirectional: bool = False
    """True if the decoder lets the tokens of an image attend to each other in both directions."""

    @property
    def head_dim(self) -> int:  # H
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:  # F
        """Numbers of a patch: channels, then rows, then columns."""
        return self.num_channels * self.patch_size**2

    @property
    def block(self) -> int:
        """Patches that become one embedding."""
        return self.merge**2

    @property
    def row_width(self) -> int:  # W
        """Width of an output row: an embedding, then the features of each deepstack layer."""
        return self.output_size * (1 + len(self.deepstack_layers))
