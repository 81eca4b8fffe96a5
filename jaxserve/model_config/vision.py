"""Vision towers as data. A family turns the vision part of a checkpoint's `config.json` into a VisionConfig.

An image is cut into square patches; the tower turns them into embeddings of the decoder's width, one for each block of
`merge` x `merge` patches. Patches of an image come block by block, those of a block row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.model_config.activation import Activation

PatchKind = Literal["convolution", "linear"]
"""convolution: the weight has channels, then rows, then columns, and there is a bias (SigLIP, Qwen3-VL).
linear: a matrix over rows, then columns, then channels, without a bias (Gemma 4)."""
PositionKind = Literal["table", "interpolated", "axes"]
"""table: a patch's row and column index a square table of learned positions (SigLIP).
interpolated: the table is stretched bilinearly over the grid of each image (Qwen3-VL).
axes: the sum of two vectors, of the patch's column from a first table and of its row from a second one (Gemma 4)."""
LayerKind = Literal["pre", "sandwich"]
"""pre: LayerNorms before attention and before a feed-forward block of two matrices, which all have biases (SigLIP, Qwen3-VL).
sandwich: RMSNorms before and after both, the feed-forward block has a gate, queries, keys and values are normalised by head,
scores are not scaled, and nothing has a bias (Gemma 4)."""
RotaryLayout = Literal["joint", "halves"]
"""joint: dimensions i and i + H / 2 rotate together, by row for the first half of the i, by column for the second (Qwen3-VL).
halves: the first half of a head rotates by column, the second by row, and i and i + H / 4 of a half together (Gemma 4)."""
Connector = Literal["linear", "mlp", "average", "scaled_average"]
"""From the patches of a block to one embedding.

linear: their vectors side by side, one matrix (SmolVLM). mlp: a LayerNorm of each vector, then two layers over the vectors
side by side (Qwen3-VL). average: their mean, an RMSNorm, one matrix (Gemma 3). scaled_average: their mean times sqrt(D), perhaps
standardised, an RMSNorm without weights, one matrix (Gemma 4)."""
BidirectionalLayers = Literal["none", "sliding", "all"]
"""Layers of the decoder in which the tokens of an image attend to each other in both directions: none; those with a window, which
hides earlier tokens only (Gemma 4); all (Gemma 3)."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """Values of pixels as the tower reads them: (value * scale - mean) / deviation, by channel."""

    scale: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """One vision tower and its connector: a transformer with attention within each image.

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
    """Rows, and columns, of the table of learned positions; vectors of each of the two tables of kind `axes`."""
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
    patches: PatchKind = "convolution"
    layers: LayerKind = "pre"
    attention_head_dim: int | None = None
    """Head dim; None: D / N."""
    has_clipped_matmuls: bool = False
    """True if inputs and outputs of every matmul of a layer are clipped to bounds that the checkpoint has."""
    is_standardized: bool = False
    """True if the connector subtracts a stored vector from each mean and multiplies it by another."""
    num_frames: int | None = None
    """Depth of the patch embedding's kernel in a tower that also reads videos; an image is that many equal frames. None: the
    kernel has no such axis."""
    rope_theta: float | None = None
    """Base of the rotation by row and column; None: queries and keys do not rotate."""
    rotary_layout: RotaryLayout = "joint"
    has_final_norm: bool = False
    """True if a LayerNorm follows the last layer."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose outputs, each through a connector of its own, are added to the decoder's first layers at the
    image's tokens (DeepStack, arXiv 2406.04334)."""
    image_patches: int | None = None
    """Patches of an encoder item if all have equally many; None: items differ."""
    patch_budget: int | None = None
    """Most patches of an encoder item, which preprocessing makes as large as that allows; None: settings alone bound them."""
    mrope_sections: tuple[int, int, int] | None = None
    """Rotary frequencies of the decoder that time, row and column turn (interleaved M-RoPE); None: a token has one position."""
    bidirectional_layers: BidirectionalLayers = "none"
    per_layer_token_id: int | None = None
    """Token whose embeddings of each decoder layer (`DecoderConfig.per_layer_dim`) the tokens of images have."""

    @property
    def head_dim(self) -> int:  # H
        return self.attention_head_dim or self.hidden_size // self.num_heads

    @property
    def is_bidirectional(self) -> bool:
        """True if tokens of an image see later ones of it in a decoder layer."""
        return self.bidirectional_layers != "none"

    @property
    def most_patches(self) -> int | None:
        """Most patches of an encoder item that preprocessing makes; None: settings alone bound them."""
        return self.image_patches or self.patch_budget

    @property
    def patch_values(self) -> int:  # F
        """Numbers of a patch as preprocessing cuts it: channels, then rows, then columns."""
        return self.num_channels * self.patch_size**2

    @property
    def block(self) -> int:
        """Patches that become one embedding."""
        return self.merge**2

    @property
    def row_width(self) -> int:  # W
        """Width of an output row: an embedding, then the features of each deepstack layer."""
        return self.output_size * (1 + len(self.deepstack_layers))
