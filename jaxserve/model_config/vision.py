"""Vision towers as data. A family turns the vision part of a checkpoint's `config.json` into a VisionConfig.

An image is cut into square patches; the tower turns them into embeddings of the decoder's width, one for each block of
`merge` x `merge` patches. Patches of an image come block by block, those of a block row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from jaxserve.model_config.activation import Activation

PatchKind = Literal["convolution", "linear", "flat", "frames"]
"""convolution: the weight has channels, then rows, then columns, and there may be a bias (SigLIP, Qwen3-VL).
linear: a matrix over rows, then columns, then channels, and there may be a bias (Gemma 4, SigLIP 2).
flat: as convolution, stored as a matrix (Llama 4). frames: as flat, and frames come before channels (Muse Glimmer)."""
PositionKind = Literal["table", "nearest", "interpolated", "linear", "padded", "cubic", "filtered", "axes", "none"]
"""table: a patch's row and column index a square table of learned positions, which a class token's may precede (SigLIP, CLIP).
nearest: the same after the grid of each image is stretched over the table, rounded down (MiniCPM-V 4.6).
interpolated: the table is stretched bilinearly over the grid of each image (Qwen3-VL).
linear: the same, and the edges of the grid are those of the table, not its corners (PaddleOCR-VL). padded: as linear, and what lies beyond an
edge of the table is zero (Muse Glimmer). cubic: as linear, bicubically (GLM-4.1V, Kimi K2.5).
filtered: as linear, and a place of a grid smaller than the table has the mean of all that it covers (SigLIP 2 NaFlex).
axes: the sum of two vectors, of the patch's column from a first table and of its row from a second one (Gemma 4).
none: positions do nothing but rotate queries and keys (Qwen2-VL)."""
LayerKind = Literal["pre", "gated", "sandwich"]
"""pre: LayerNorms before attention and before a feed-forward block of two matrices (SigLIP, Qwen3-VL).
gated: RMSNorms before both, and the feed-forward block has a gate (Qwen2.5-VL).
sandwich: RMSNorms before and after both, the feed-forward block has a gate, queries, keys and values are normalised by head,
and scores are not scaled (Gemma 4)."""
RotaryLayout = Literal["joint", "columns_first", "alternating", "halves", "adjacent", "adjacent_halves"]
"""joint: dimensions i and i + H / 2 rotate together, by row for the first half of the i, by column for the second (Qwen3-VL).
columns_first: as joint, but by column for the first half of the i, by row for the second (Muse Glimmer).
alternating: as joint, but with frequencies of the whole head, those of even number by row and the others by column (Pixtral).
halves: the first half of a head rotates by column, the second by row, and i and i + H / 4 of a half together (Gemma 4).
adjacent: dimensions 2 i and 2 i + 1 rotate together, by column for even i and by row for odd i, both with the frequency of i / 2 (Kimi K2.5).
adjacent_halves: dimensions 2 i and 2 i + 1 rotate together, by column for the first half of the i, by row for the second, both counted from 1; a
class token does not rotate (Llama 4)."""
Connector = Literal[
    "linear",
    "biased_linear",
    "mlp",
    "rms_mlp",
    "rms_mlp_linear",
    "projector",
    "mean_projector",
    "normed_projector",
    "patch_normed_projector",
    "gated_projector",
    "normed_gated_projector",
    "merged_projector",
    "average",
    "scaled_average",
    "normed",
    "activated",
    "activated_normed",
    "downsampled",
    "placed",
    "tabled",
]
"""From the patches of a block to one embedding.

linear: their vectors side by side, one matrix (SmolVLM). biased_linear: the same with a bias (PaliGemma). mlp: a LayerNorm of each vector, then two layers over the vectors
side by side (Qwen2-VL, Qwen3-VL, PaddleOCR-VL, Kimi K2.5). rms_mlp: the same with an RMSNorm (Qwen2.5-VL). rms_mlp_linear: the same and
another matrix (HyperCLOVA X SEED Think 32B). projector: two layers over them (LLaVA, Pixtral). mean_projector: the same over their mean (VideoLLaMA 3). normed_projector: a LayerNorm of the vectors side by side before these (InternVL, LFM2-VL). patch_normed_projector: a LayerNorm of each vector before these (LFM3-VL). gated_projector: two layers
over them, of which the second reads the first half of the first one's outputs times an activation of the other half (Cohere 2 Vision). normed_gated_projector: a LayerNorm of the vectors side by side before these (Aya Vision). merged_projector: an RMSNorm of each vector and one matrix before these (Mistral 3, LightOnOCR). average: their mean, an RMSNorm, one matrix (Gemma 3). scaled_average: their mean times sqrt(D), perhaps
standardised, an RMSNorm without weights, one matrix (Gemma 4). normed: an RMSNorm without weights, one matrix (Gemma 4 12B). activated: two layers over the vectors side by side, an activation after each, one matrix (Llama 4). activated_normed: the same over the first numbers of the vectors, then the second ones and so on, and
an RMSNorm without weights (Muse Glimmer). downsampled: one matrix over the vectors side by side, another one, a LayerNorm,
and a feed-forward block with a gate (GLM-4.1V). placed: a LayerNorm of each vector, one matrix over them side by side, a fixed vector for the
block's row and column, a LayerNorm, an activation, another matrix and a LayerNorm (Granite for Docling). tabled: one matrix over the vectors side by side, a
LayerNorm, and the mean of the rows of a table with the softmax of these numbers as shares (Ovis2)."""
BidirectionalLayers = Literal["none", "sliding", "all"]
"""Layers of the decoder in which the tokens of an image attend to each other in both directions: none; those with a window, which
hides earlier tokens only (Gemma 4); all (Gemma 3, and PaliGemma with its whole prompt: `DecoderConfig.has_whole_prompts`)."""
SectionLayout = Literal["interleaved", "chunks"]
"""interleaved: neighbouring frequencies turn by time, row, column, time and so on (Qwen3-VL). chunks: the first frequencies turn by
time, the next ones by row, the last ones by column (Qwen2-VL)."""


@dataclass(frozen=True, slots=True)
class Normalization:
    """Values of pixels as the tower reads them: (value * scale - mean) / deviation, by channel."""

    scale: float
    means: tuple[float, ...]
    deviations: tuple[float, ...]
    is_rounded: bool = False
    """True if means, deviations and each of the three results are rounded to bfloat16 (Llama 4)."""


def num_embeddings(num_patches: Any, block: int, class_length: int | None) -> Any:
    """Return the embeddings of whole images with this many patches, a number or a traced one, `block` of which become one.

    class_length: see `VisionConfig`.
    """
    if class_length is not None:
        num_patches = num_patches // class_length * (class_length - 1)
    return num_patches // block


_MOST_MARKS: Final = 3


def most_embeddings(num_outputs: int, num_patches: int, tile_patches: int) -> int:
    """Return the most embeddings of whole images of which preprocessing says what they are (`VisionConfig.num_sources`).

    These are the outputs of the connector, and one more for each row of a tile, or up to three marks around it.
    """
    if not tile_patches:
        return 2 * num_outputs  # at least 2 x 2 outputs, a vector after each row, before and after all of them
    num_tiles = num_patches // tile_patches
    return num_outputs + num_tiles * max(math.isqrt(num_outputs // num_tiles), _MOST_MARKS)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """One vision tower and its connector: a transformer with attention within each image, or within its windows.

    Letters: P patches, F numbers of a patch, D width, N heads, H head dim, W width of an output row.
    """

    hidden_size: int  # D
    intermediate_size: int
    num_layers: int
    """0: embeddings are made of patches by matrices and norms alone (Gemma 4 12B)."""
    num_heads: int  # N
    """Query heads."""
    patch_size: int
    """Pixels of a patch's side."""
    norm_eps: float
    activation: Activation
    positions: PositionKind
    positions_per_side: int
    """Rows, and columns, of the table of learned positions; vectors of each of the two tables of kind `axes`."""
    connector: Connector
    connector_eps: float
    """Epsilon of the connector's norm, if it has one."""
    merge: int
    """Patches of a block's side: `merge` ** 2 of them become one embedding."""
    output_size: int
    """Width of an embedding: that of the decoder."""
    normalization: Normalization
    image_token_id: int
    """Token that stands for one embedding in a prompt."""
    connector_activation: Activation = "gelu"
    """Activation of a connector of two layers."""
    connector_scale: float = 1.0
    """Factor on the output of a connector of kind `placed` or `rms_mlp_linear`."""
    has_connector_biases: bool = True
    """True if the two layers of a projector have biases."""
    connector_width: int | None = None
    """Rows of the table of a connector of kind `tabled`; width between the two layers of a projector, with a gate's, None: that of the decoder; width within the feed-forward block of a connector of kind
    `downsampled`; width before the last matrix of one of kind `rms_mlp_linear`; width between the two layers of one of kind `mlp`, None: that of a block's vectors
    side by side."""
    num_channels: int = 3
    patches: PatchKind = "convolution"
    has_patch_bias: bool = True
    """True if the patch embedding has a bias."""
    pixel_norm_eps: float | None = None
    """Epsilon of a LayerNorm of the numbers of a patch before a patch embedding of kind `linear`; None: there is none (Gemma 4 12B)."""
    layers: LayerKind = "pre"
    has_biases: bool = True
    """True if matmuls of layers have biases."""
    has_qkv_biases: bool | None = None
    """True if matmuls of queries, keys and values have biases; None: as other matmuls of layers."""
    has_rms_norms: bool = False
    """True if the norms of layers of kind `pre` are RMSNorms (InternViT-6B)."""
    has_head_norms: bool = False
    """True if queries and keys of layers of kind `gated` are normalised by head (GLM-OCR)."""
    joint_norm_eps: float | None = None
    """Epsilon of an RMSNorm over the queries of all heads together, and of one over the keys; None: there are none (InternViT-6B)."""
    has_layer_scales: bool = False
    """True if what attention and feed-forward block add is multiplied by a learned vector each (InternViT)."""
    window: int | None = None
    """Patches of a window's side: patches of a layer that is not in `full_layers` attend within their window. Windows follow each other on
    the axis of patches. None: patches of all layers attend within their image."""
    full_layers: tuple[int, ...] = ()
    """Layers whose patches attend within their image, in a tower with windows."""
    num_kv_heads: int | None = None
    """Key and value heads, None: as many as queries have."""
    conv_layers: tuple[int, ...] = ()
    """Layers with a gated convolution over the grid of each image in place of attention."""
    conv_size: int | None = None
    """Patches of a side of these convolutions' kernels."""
    attention_head_dim: int | None = None
    """Head dim; None: D / N."""
    has_clipped_matmuls: bool = False
    """True if inputs and outputs of every matmul of a layer are clipped to bounds that the checkpoint has."""
    is_standardized: bool = False
    """True if the connector subtracts a stored vector from each mean and multiplies it by another."""
    num_frames: int | None = None
    """Depth of the patch embedding's kernel in a tower that also reads videos; an image is that many equal frames. None: the
    kernel has no such axis."""
    has_videos: bool = False
    """True if videos are served."""
    rope_theta: float | None = None
    """Base of the rotation by row and column; None: queries and keys do not rotate."""
    rotary_layout: RotaryLayout = "joint"
    has_class_token: bool = False
    """True if each item begins with a learned vector that no patch made, in a place at row 0 and column -1. Other patches attend to it, and
    no embedding is made of it (CLIP)."""
    has_patch_norm: bool = False
    """True if a norm follows the patch embedding, before positions are added."""
    has_first_norm: bool = False
    """True if a norm precedes the first layer, after positions were added."""
    has_final_norm: bool = False
    """True if a norm follows the last layer: an RMSNorm in a tower with `gated` layers, otherwise a LayerNorm."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose outputs, each through a connector of its own, are added to the decoder's first layers at the
    image's tokens (DeepStack, arXiv 2406.04334)."""
    feature_layers: tuple[int, ...] = ()
    """Numbers of layers, from 1 on, whose outputs side by side, in this order, the connector reads; none: the last one's."""
    merger_layer: int | None = None
    """Layer after which one vector of the `inner_merge` ** 2 patches of a window is made, so that later layers have fewer (MiniCPM-V 4.6);
    None: patches are merged by the connector alone."""
    inner_merge: int = 1
    """Patches of the side of these windows, which follow each other within a block."""
    image_patches: int | None = None
    """Patches of an encoder item if all have equally many, with the place of a class token; None: items differ."""
    patch_budget: int | None = None
    """Most patches of an encoder item, which preprocessing makes as large as that allows; None: settings alone bound them."""
    deepstack_connector: Connector = "mlp"
    """Kind of the connectors of these layers. Of kind `mlp`, the vectors of a block are normalised together here."""
    mrope_sections: tuple[int, int, int] | None = None
    """Rotary frequencies of the decoder that time, row and column turn (M-RoPE); None: a token has one position."""
    mrope_layout: SectionLayout = "interleaved"
    bidirectional_layers: BidirectionalLayers = "none"
    num_sources: int = 0
    """Numbers by which preprocessing says what each embedding of an image is. 0: none, each output of the connector is one. 1: the place
    of an output, or, after all of them, of a learned vector. 8: the places of four outputs, and their shares as the bits of float32."""
    most_tiles: int = 1
    """Most tiles of `image_patches` patches that are one encoder input."""
    num_marks: int = 0
    """Last rows of the table of a connector of kind `tabled`, which are learned vectors of their own."""
    has_one_share: bool = False
    """True if a connector of kind `tabled` takes the row with the largest share only."""
    has_newline: bool = False
    """True if there is a learned vector that ends a row of embeddings (LLaVA-NeXT)."""
    unused_tensors: tuple[str, ...] = ()
    """Starts of our names of tensors that a checkpoint may hold and that are not read."""
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
    def window_layers(self) -> tuple[int, ...]:
        """Layers whose patches attend within windows."""
        if self.window is None:
            return ()
        return tuple(layer for layer in range(self.num_layers) if layer not in self.full_layers)

    @property
    def patch_frames(self) -> int:
        """Frames of a patch: `num_frames` if videos are served, and otherwise one, which stands for all of them."""
        return self.num_frames or 1 if self.has_videos else 1

    @property
    def after_merger(self) -> VisionConfig:
        """The config of the connector, which reads the vectors that are made after `merger_layer` in place of patches."""
        return self if self.merger_layer is None else replace(self, merge=self.merge // self.inner_merge)

    @property
    def patch_values(self) -> int:  # F
        """Numbers of a patch as the tower reads it: channels, then frames, then rows, then columns."""
        return self.num_channels * self.patch_frames * self.patch_size**2

    @property
    def feature_width(self) -> int:
        """Numbers of a patch that the connector reads."""
        return self.hidden_size * max(1, len(self.feature_layers))

    @property
    def block(self) -> int:
        """Patches that become one embedding."""
        return self.merge**2

    def num_rows(self, num_patches: Any) -> Any:
        """Return the embeddings of whole images with this many patches."""
        return num_embeddings(num_patches, self.block, self.class_length)

    @property
    def tile_patches(self) -> int:
        """Patches of a tile of an encoder input that may have several; 0: inputs have no tiles."""
        return (self.image_patches or 0) if self.num_sources else 0

    @property
    def class_length(self) -> int | None:
        """Patches of an item with its class token; None: there is no class token."""
        return self.image_patches if self.has_class_token else None

    @property
    def row_width(self) -> int:  # W
        """Width of an output row: an embedding, then the features of each deepstack layer."""
        return self.output_size * (1 + len(self.deepstack_layers))
