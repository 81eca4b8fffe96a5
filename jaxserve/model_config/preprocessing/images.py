"""Preprocessing of images as data: sizes, tiles, normalisation, and the text that stands for an image in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.model_config.vision import Normalization

Enlargement = Literal["none", "both", "in_turn"]
"""both: both sides grow by one factor, until the shorter one is as long as a block, and are rounded down (GLM-4.1V). in_turn: the same if the
height is too short, with the width rounded, and then if the width is (PaddleOCR-VL)."""
Resampling = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]


@dataclass(frozen=True, slots=True)
class TileSizes:
    """An image is enlarged or reduced, cut into square tiles, and followed by the whole image as one more tile (Idefics3)."""

    longest_edge: int
    """Pixels of the longer side before it is rounded up to whole tiles."""
    tile: int
    """Pixels of a tile's side."""
    is_split: bool
    """False: the whole image becomes one tile."""


@dataclass(frozen=True, slots=True)
class AreaSizes:
    """Both sides are rounded to whole blocks, and the area is kept between two bounds (Qwen2-VL)."""

    min_pixels: int
    max_pixels: int
    frames: int = 1
    """Number of times that the bounds count an image's area (GLM-4.1V), or frames of a video."""
    enlargement: Enlargement = "none"
    """Rule for an image with a side shorter than a block."""
    has_whole_blocks: bool = False
    """True if no side is rounded to less than a block before the area is compared with the bounds (LFM2-VL)."""
    compared_frames: int | None = None
    """Frames by which the rounded area of a video is compared with the bounds (Qwen3-VL); None: `frames`."""
    bound: int | None = None
    """Pixels of an image that the engine can encode; None: any number."""


@dataclass(frozen=True, slots=True)
class PanAndScan:
    """A long image is followed by crops of it, side by side along its longer side (Gemma 3, arXiv 2503.19786)."""

    min_crop_size: int
    """Pixels of the shorter side of the smallest crop."""
    max_crops: int
    min_ratio: float
    """Ratio of the longer to the shorter side from which an image is cropped."""


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Every image, and every crop of one, is stretched to one size (SigLIP)."""

    height: int
    width: int
    crops: PanAndScan | None = None
    """None: images are not cropped."""


@dataclass(frozen=True, slots=True)
class CentralSquare:
    """The shorter side becomes `shortest` pixels long, and a square is cut out of the middle (CLIP)."""

    shortest: int
    side: int
    """Pixels of the square's side, at most `shortest`."""
    padding: tuple[int, int, int] | None = None
    """Colour of the margins that make an image a square before, with the image in their middle; None: there are none."""


@dataclass(frozen=True, slots=True)
class GridTiles:
    """An image is stretched to the grid of square tiles whose proportions are nearest to its own, cut into them, and followed by the whole
    image as one more tile (InternVL)."""

    tile: int
    """Pixels of a tile's side."""
    min_tiles: int
    """Fewest tiles of a grid."""
    max_tiles: int
    max_side: int | None = None
    """Most tiles of a row or column; None: `max_tiles`."""
    is_nearest_size: bool = False
    """True if the grid is instead the one that enlarges the image least, or else reduces it least (Cohere 2 Vision)."""


@dataclass(frozen=True, slots=True)
class DensePages:
    """Pages that a grid would show too small are cut into more tiles. 0 leaves a condition out."""

    max_tiles: int
    scale: float
    """Ratio of the grid's width in pixels to the page's, below which a page is one of them."""
    min_ratio: float
    """Ratio of the width to the height above which a page is one of them."""
    max_ratio: float
    """Largest ratio of the width to the height."""


@dataclass(frozen=True, slots=True)
class MarkedTiles:
    """An image is cut as by a grid, and marks stand before all tiles, also before a single one (Granite for Docling)."""

    grid: GridTiles
    dense: DensePages | None = None


@dataclass(frozen=True, slots=True)
class CoveringTiles:
    """An image is cut as by a grid, after the whole image as a first tile, and marks between the tiles have learned vectors (Ovis2)."""

    grid: GridTiles
    is_covering: bool
    """True if the grid is instead the smallest one whose tiles, unless they are reduced, cover nearly all of the image."""


@dataclass(frozen=True, slots=True)
class CanvasTiles:
    """An image is scaled in its proportions to fit the best of all grids of square tiles, with black margins at its right or lower edge, cut
    into the tiles, and followed by the whole image as one more tile (Llama 4)."""

    tile: int
    """Pixels of a tile's side."""
    max_tiles: int
    is_enlarged: bool
    """True if an image is scaled to the largest grid; False: to the smallest that holds it, and it stays as it is if its sides are longer
    than a tile's."""


@dataclass(frozen=True, slots=True)
class JoinedTiles:
    """An image is scaled in its proportions to fit the best of several grids of square tiles, and stands in the middle of it, on black. The
    whole image, stretched to a tile, and the tiles are one encoder input. The embeddings of the tiles become one grid, from which the margins
    are cut, and a learned vector ends each row of it (LLaVA-NeXT)."""

    tile: int
    """Pixels of a tile's side."""
    grids: tuple[tuple[int, int], ...]
    """Rows and columns of tiles."""
    most_tiles: int | None = None
    """Tiles whose embeddings are as many as those of the grid at most: a larger grid is stretched to it (LLaVA-OneVision); None: any number."""
    padding: tuple[int, int, int] | None = None
    """Colour of the margins that make images squares of one tile each if a prompt has several; None: these are cut, too."""


@dataclass(frozen=True, slots=True)
class TiledAreas:
    """A large image is cut into the tiles of a grid, and followed by the whole image with an area within bounds; other images are whole
    (LFM2-VL)."""

    whole: AreaSizes
    grid: GridTiles
    most_pixels: float
    """Largest area of an image that is not cut, counted in whole blocks."""
    has_whole: bool
    """True if the whole image follows its tiles."""


@dataclass(frozen=True, slots=True)
class BudgetSizes:
    """Both sides are scaled by one factor until the image has `max_patches` patches, then rounded down to whole blocks (Gemma 4)."""

    max_patches: int


@dataclass(frozen=True, slots=True)
class LimitedSides:
    """An image is reduced until neither side is longer than `longest` pixels; then both sides are rounded up to whole blocks (Pixtral)."""

    longest: int


@dataclass(frozen=True, slots=True)
class NearestBlocks:
    """An image is stretched to whole blocks, whose rows and columns are its sides in blocks, rounded down or up so that the proportions
    change least (Muse Glimmer)."""

    max_blocks: int
    """Most blocks of an image; larger ones are reduced before."""


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """An image is reduced until it has at most `max_patches` whole patches; then black margins at its right and lower end make whole
    blocks (Kimi K2.5)."""

    max_patches: int
    max_side: int
    """Most patches of a row and of a column."""
    bound: int | None = None
    """Most patches with those of the margins; None: there is no bound."""


@dataclass(frozen=True, slots=True)
class SlicedAreas:
    """An image is scaled in its proportions to the area of a square with sides of `side` pixels. A larger one is followed by the parts of a grid
    of several, each of about that area (MiniCPM-V 4.6)."""

    side: int
    max_slices: int
    """Most parts of an image; 1: images are not cut."""
    bound: int | None = None
    """Pixels of the whole image, and of a part, that the engine can encode; None: any number."""


Sizes = (
    TileSizes
    | SlicedAreas
    | GridTiles
    | CanvasTiles
    | MarkedTiles
    | CoveringTiles
    | TiledAreas
    | JoinedTiles
    | AreaSizes
    | FixedSize
    | CentralSquare
    | BudgetSizes
    | LimitedSides
    | NearestBlocks
    | PaddedSizes
)


@dataclass(frozen=True, slots=True)
class ImageMarkup:
    """Texts of a prompt that stand for images. They are control tokens of the tokenizer, but for line breaks and Qianfan-OCR's placeholder."""

    placeholder: str
    """Text that chat templates write for an image, and that `ImagePrompt.text` replaces."""
    token: str
    """Text of the token that stands for one embedding."""
    begin: str = ""
    """Text before the tokens of an image or tile."""
    end: str = ""
    """Text after the tokens of an image, or of the last tile."""
    number: str = ""
    """Text before an image, with its {number} among those of the prompt, from 0 on."""
    opening: str = ""
    """Text before an image and all of its tiles."""
    line_break: str = ""
    """Text between two rows of an image's tokens: one token; empty: rows follow each other."""
    single: str = ""
    """Mark of an image that is not cut, after `begin`."""
    whole: str = ""
    """Mark of the whole image after its tiles, after `begin`."""
    tile: str = ""
    """Mark of any other tile, with {row} and {column}, or {number}, from 1 on, after `begin`."""
    whole_end: str = ""
    """Text after the tokens of the whole image after its tiles."""
    tile_end: str = ""
    """Text after the tokens of each tile, and of an image that is not cut."""
    tile_break: str = ""
    """Text between two tiles of a row."""
    row_end: str = ""
    """Text after each row of tiles."""
    tiles_end: str = ""
    """Text between all rows of tiles and the whole image."""
    cropped: str = "{image}{crops}"
    """Text of an image with crops, from the texts of the image and of its crops."""


@dataclass(frozen=True, slots=True)
class ImageProcessorConfig:
    """Preprocessing of images as `preprocessor_config.json` and the vision part of `config.json` say."""

    sizes: Sizes
    patch_size: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a block, which becomes one token."""
    markup: ImageMarkup
    resampling: Resampling
    normalization: Normalization
    image_token_id: int
    """Token that stands for one embedding in a prompt."""
    mark_token_ids: tuple[int, ...] = ()
    """Tokens that stand for learned vectors among those of an image, in the order of the vectors (Ovis2)."""
    window: int | None = None
    """Patches of a window's side, whose blocks follow each other as the tower reads them; None: blocks follow each other row by row."""
    inner_merge: int = 1
    """Patches of the side of windows that follow each other within a block: see `VisionConfig`."""
    has_class_token: bool = False
    """True if the tower puts a class token before the patches of each item: see `VisionConfig`."""
