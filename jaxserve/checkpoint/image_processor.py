"""Reads how a checkpoint's images are preprocessed: `preprocessor_config.json`, or its table in `processor_config.json`,
with the sizes of the vision part of `config.json` and the texts of control tokens in `tokenizer_config.json`; or their equivalents in
GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.gguf.mmproj import open_mmproj
from jaxserve.errors import CheckpointError, shown
from jaxserve.model_config.images import (
    AreaSizes,
    BudgetSizes,
    CentralSquare,
    FixedSize,
    GridTiles,
    ImageMarkup,
    ImageProcessorConfig,
    LimitedSides,
    PanAndScan,
    Resampling,
    Sizes,
    TileSizes,
)
from jaxserve.model_config.vision import Normalization

_RESAMPLING: Final[tuple[Resampling, ...]] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters in the order of Pillow's numbers."""
_MAX_SIDE: Final = 1 << 14
_MAX_AREA: Final = 1 << 28
_MAX_CROPS: Final = 64
_MAX_TILES: Final = 64
_CROPPED: Final = "Here is the original image {image} and here are some crops to help you see better {crops}"
"""Text of an image with crops (transformers' text of Gemma 3)."""
_CLIP: Final = "clip_vision_model"
_CLIP_MEANS: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATIONS: Final = (0.26862954, 0.26130258, 0.27577711)
_OWN, _JOINT = "preprocessor_config.json", "processor_config.json"
FILES: Final = (_OWN, _JOINT)
"""Files of a checkpoint that describe preprocessing."""


def read_image_processor(directory: Path, mmproj: Path | None = None) -> ImageProcessorConfig | None:
    """Read the preprocessing of the checkpoint in `directory`; None if it describes none.

    mmproj: the file of the image encoder, if `directory` is the GGUF file of a text model. Raises CheckpointError naming file and
    key for a value that is not supported.
    """
    if mmproj is not None:
        tower, text = open_mmproj(mmproj), open_gguf(directory)
        return _read(_Table(mmproj, tower.preprocessing()), tower.config(text), tower.tokens(text))
    own, joint = directory / _OWN, directory / _JOINT
    table: Any = read_object(own) if own.is_file() else None
    path = own
    if table is None and joint.is_file():
        table, path = read_object(joint).get("image_processor"), joint
    config = directory / "config.json"
    if not isinstance(table, dict) or not config.is_file():
        return None
    tokens = directory / "tokenizer_config.json"
    table = {key: value for key, value in table.items() if value is not None}
    return _read(_Table(path, table), read_object(config), read_object(tokens) if tokens.is_file() else {})


class _Table:
    """Values of one file, checked where they are used."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, default: Any) -> Any:
        return self._values.get(key, default)

    def integer(self, key: str, default: int | None, high: int) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            raise self.error(key, f"an integer from 1 to {high}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def number(self, key: str, default: float) -> float:
        (value,) = self.numbers(key, [default], 1)
        return value

    def numbers(self, key: str, default: list[float], count: int) -> tuple[float, ...]:
        values = self.get(key, default)
        values = values if isinstance(values, list) else [values]
        if len(values) != count or not all(type(value) in (int, float) and abs(value) < 1e6 for value in values):
            raise self.error(key, f"{count} numbers")
        return tuple(map(float, values))

    def table(self, key: str, default: dict[str, int]) -> _Table:
        value = self.get(key, default)
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return _Table(self.path, value)

    def error(self, key: str, expected: str) -> CheckpointError:
        found = shown(str(self._values.get(key))) if key in self._values else "nothing"
        return CheckpointError(f"{self.path}: {key}: expected {expected}, found {found}")


class _Geometry(NamedTuple):
    """Sizes of images, patches and blocks, and the texts that stand for an image."""

    sizes: Sizes
    patch_size: int
    merge: int
    markup: ImageMarkup
    window: int | None = None
    has_class_token: bool = False


def _tiles(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """Idefics3 and SmolVLM: square tiles in rows, then the whole image as one more tile."""
    tile = table.table("max_image_size", {"longest_edge": 364}).integer("longest_edge", 364, _MAX_SIDE)
    longest = table.table("size", {"longest_edge": 4 * 364}).integer("longest_edge", 4 * 364, _MAX_SIDE)
    sizes = TileSizes(longest, tile, table.flag("do_image_splitting", default=True))
    image = _token(tokens, "image_token", "<image>")
    around = _token(tokens, "fake_image_token", "<fake_token_around_image>")
    markup = ImageMarkup(
        placeholder=image,
        token=image,
        begin=around,
        end=around,
        whole=_token(tokens, "global_image_token", "<global-img>"),
        tile="<row_{row}_col_{column}>",
    )
    patch = config.table("vision_config", {}).integer("patch_size", 32, _MAX_SIDE)
    return _Geometry(sizes, patch, config.integer("scale_factor", 2, 64), markup)


def _areas(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """Qwen2-VL and its successors: the area stays within bounds, and templates mark begin and end themselves."""
    size = table.table("size", {})
    low = table.get("min_pixels", size.get("shortest_edge", 56 * 56))
    high = table.get("max_pixels", size.get("longest_edge", 28 * 28 * 1280))
    bounds = _Table(table.path, {"min_pixels": low, "max_pixels": high})
    sizes = AreaSizes(bounds.integer("min_pixels", None, _MAX_AREA), bounds.integer("max_pixels", None, _MAX_AREA))
    image = _token(tokens, "image_token", "<|image_pad|>")
    patch, merge = table.integer("patch_size", 14, _MAX_SIDE), table.integer("merge_size", 2, 64)
    return _Geometry(sizes, patch, merge, ImageMarkup(image, image), _window(config, patch, merge))


def _frames(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """GLM-4.1V and its successors: as Qwen2-VL, but bounds are those of an image's equal frames together."""
    size = table.table("size", {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000})
    low, high = (size.integer(f"{edge}_edge", None, _MAX_AREA) for edge in ("shortest", "longest"))
    sizes = AreaSizes(low, high, table.integer("temporal_patch_size", 2, 16), is_enlarged=True)
    image = _token(tokens, "image_token", "<|image|>")
    patch, merge = table.integer("patch_size", 14, _MAX_SIDE), table.integer("merge_size", 2, 64)
    return _Geometry(sizes, patch, merge, ImageMarkup(image, image))


def _window(config: _Table, patch: int, merge: int) -> int | None:
    """Return the patches of the side of a window, whole blocks, of Qwen2.5-VL's tower; None for its relatives."""
    if config.get("model_type", None) != "qwen2_5_vl":
        return None
    own = config.table("vision_config", {})
    pixels = own.integer("window_size", 112, _MAX_SIDE)
    if pixels < patch * merge:
        raise own.error("window_size", f"at least {patch * merge} pixels, the side of a block")
    return pixels // (patch * merge) * merge


def _fixed(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """Gemma 3: every image and crop has one size, and blank lines around it."""
    size = table.table("size", {"height": 224, "width": 224})
    height, width = (size.integer(side, None, _MAX_SIDE) for side in ("height", "width"))
    sizes = FixedSize(height, width, _pan_and_scan(table))
    begin, end = _token(tokens, "boi_token", "<start_of_image>"), _token(tokens, "eoi_token", "<end_of_image>")
    token = _token(tokens, "image_token", "<image_soft_token>")
    markup = ImageMarkup(placeholder=begin, token=token, begin=f"\n\n{begin}", end=f"{end}\n\n", cropped=_CROPPED)
    patch = config.table("vision_config", {}).integer("patch_size", 16, _MAX_SIDE)
    per_side = sizes.height // patch
    blocks = round(config.integer("mm_tokens_per_image", 256, 1 << 16) ** 0.5)
    if sizes.height != sizes.width or per_side % blocks:
        raise table.error("size", f"a square whose patches of {patch} pixels divide into {blocks} blocks a side")
    return _Geometry(sizes, patch, per_side // blocks, markup)


def _pan_and_scan(table: _Table) -> PanAndScan | None:
    """Read how images are cropped. Defaults are those of transformers' `Gemma3Processor`."""
    if not table.flag("do_pan_and_scan", default=False):
        return None
    return PanAndScan(
        min_crop_size=table.integer("pan_and_scan_min_crop_size", 256, _MAX_SIDE),
        max_crops=table.integer("pan_and_scan_max_num_crops", 4, _MAX_CROPS),
        min_ratio=table.number("pan_and_scan_min_ratio_to_activate", 1.2),
    )


def _plain(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """LLaVA with SigLIP or CLIP: images of one size, and nothing around their tokens."""
    size = table.get("size", {"shortest_edge": 224})
    if isinstance(size, int):
        size = {"shortest_edge": size}
    bounds = _Table(table.path, {"size": size}).table("size", {})
    sizes: Sizes
    if "height" in size:
        height, width = (bounds.integer(side, None, _MAX_SIDE) for side in ("height", "width"))
        sizes = FixedSize(height, width)
        if height != width:
            raise table.error("size", "a square")
    else:
        sizes = _central_square(table, bounds.integer("shortest_edge", None, _MAX_SIDE))
    token, vision = _token(tokens, "image_token", "<image>"), config.table("vision_config", {})
    patch = vision.integer("patch_size", 32, _MAX_SIDE)
    has_class_token = vision.get("model_type", _CLIP) == _CLIP
    return _Geometry(sizes, patch, 1, ImageMarkup(token, token), has_class_token=has_class_token)


def _central_square(table: _Table, shortest: int) -> CentralSquare:
    if not table.flag("do_center_crop", default=True):
        raise table.error("do_center_crop", "true")
    crop = table.get("crop_size", {"height": 224, "width": 224})
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    bounds = _Table(table.path, {"crop_size": crop}).table("crop_size", {})
    height, width = (bounds.integer(side, None, _MAX_SIDE) for side in ("height", "width"))
    if height != width or height > shortest:
        raise table.error("crop_size", f"a square with sides of at most {shortest} pixels")
    if not table.flag("do_pad", default=False):
        return CentralSquare(shortest, height)
    red, green, blue = (int(mean * 255) for mean in table.numbers("image_mean", list(_CLIP_MEANS), 3))
    return CentralSquare(shortest, height, (red, green, blue))


def _grid(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """InternVL: tiles, as its processor of images and texts cuts them whatever `crop_to_patches` says, and one mark around all of them."""
    size = table.table("size", {"height": 384, "width": 384})
    height, width = (size.integer(side, None, _MAX_SIDE) for side in ("height", "width"))
    if height != width:
        raise table.error("size", "a square")
    most = table.integer("max_patches", 12, _MAX_TILES)
    sizes = GridTiles(height, table.integer("min_patches", 1, most), most)
    token = _token(tokens, "context_image_token", "<IMG_CONTEXT>")
    begin, end = _token(tokens, "start_image_token", "<img>"), _token(tokens, "end_image_token", "</img>")
    patch = config.table("vision_config", {}).get("patch_size", 14)
    patch = patch[0] if isinstance(patch, list) and patch else patch
    side = _Table(config.path, {"patch_size": patch}).integer("patch_size", None, _MAX_SIDE)
    ratio = config.number("downsample_ratio", 0.5)
    if not 1 / 64 <= ratio <= 1:
        raise config.error("downsample_ratio", "a number from 1/64 to 1")
    markup = ImageMarkup(token, token, begin, end)
    return _Geometry(sizes, side, int(1 / ratio), markup, has_class_token=True)


def _budget(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """Gemma 4: as many patches as fit a number of tokens, in the image's proportions."""
    merge = table.integer("pooling_kernel_size", 3, 64)
    sizes = BudgetSizes(table.integer("max_soft_tokens", 280, 1 << 14) * merge**2)
    image = _token(tokens, "image_token", "<|image|>")
    begin, end = _token(tokens, "boi_token", "<|image>"), _token(tokens, "eoi_token", "<image|>")
    markup = ImageMarkup(placeholder=image, token=image, begin=begin, end=end)
    return _Geometry(sizes, table.integer("patch_size", 16, _MAX_SIDE), merge, markup)


def _limited(table: _Table, config: _Table, tokens: Mapping[str, Any]) -> _Geometry:
    """Pixtral and Mistral 3: sides up to a limit, and a break after each row of tokens. Sizes of patches are those of the tower."""
    longest = table.table("size", {"longest_edge": 1024}).integer("longest_edge", 1024, _MAX_SIDE)
    merge = config.integer("spatial_merge_size", 2 if config.get("model_type", None) == "mistral3" else 1, 64)
    patch = config.table("vision_config", {}).integer("patch_size", 16, _MAX_SIDE)
    image = _token(tokens, "image_token", "[IMG]")
    markup = ImageMarkup(
        placeholder=image,
        token=image,
        end=_token(tokens, "image_end_token", "[IMG_END]"),
        line_break=_token(tokens, "image_break_token", "[IMG_BREAK]"),
    )
    return _Geometry(LimitedSides(longest), patch, merge, markup)


class _Reader(NamedTuple):
    """Function that reads what differs between processors, and defaults of what they share."""

    geometry: Callable[[_Table, _Table, Mapping[str, Any]], _Geometry]
    resampling: Resampling
    means: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviations: tuple[float, float, float] = (0.5, 0.5, 0.5)
    is_normalized: bool = True


_QWEN: Final = _Reader(_areas, "bicubic", _CLIP_MEANS, _CLIP_DEVIATIONS)
_GLM: Final = _Reader(_frames, "bicubic", _CLIP_MEANS, _CLIP_DEVIATIONS)
_READERS: Final[Mapping[str, _Reader]] = {
    "Idefics3ImageProcessor": _Reader(_tiles, "lanczos"),
    "SmolVLMImageProcessor": _Reader(_tiles, "lanczos"),
    "Qwen2VLImageProcessor": _QWEN,
    "Qwen3VLImageProcessor": _QWEN,
    "Gemma3ImageProcessor": _Reader(_fixed, "bilinear"),
    "Glm4vImageProcessor": _GLM,
    "Glm46VImageProcessor": _GLM,
    "CLIPImageProcessor": _Reader(_plain, "bicubic", _CLIP_MEANS, _CLIP_DEVIATIONS),
    "LlavaImageProcessor": _Reader(_plain, "bicubic", _CLIP_MEANS, _CLIP_DEVIATIONS),
    "GotOcr2ImageProcessor": _Reader(_grid, "bicubic", _CLIP_MEANS, _CLIP_DEVIATIONS),
    "SiglipImageProcessor": _Reader(_plain, "bicubic"),
    "PixtralImageProcessor": _Reader(_limited, "bicubic", _CLIP_MEANS, _CLIP_DEVIATIONS),
    "Gemma4ImageProcessor": _Reader(_budget, "bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), is_normalized=False),
}
"""By `image_processor_type`, which transformers may extend by the kind of its implementation."""


def _read(table: _Table, config: Mapping[str, Any], tokens: Mapping[str, Any]) -> ImageProcessorConfig:
    name = str(table.get("image_processor_type", ""))
    reader = _READERS.get(name.removesuffix("Fast").removesuffix("Pil"))
    if reader is None:
        raise table.error("image_processor_type", f"one of {', '.join(_READERS)}")
    if not table.flag("do_resize", default=True):
        raise table.error("do_resize", "true")
    model = _Table(table.path.parent / "config.json", config)
    token = "image_token_id" if config.get("image_token_id") is not None else "image_token_index"
    geometry = reader.geometry(table, model, tokens)
    return ImageProcessorConfig(
        sizes=geometry.sizes,
        patch_size=geometry.patch_size,
        merge=geometry.merge,
        markup=geometry.markup,
        window=geometry.window,
        has_class_token=geometry.has_class_token,
        resampling=_resampling(table, reader.resampling),
        normalization=_normalization(table, reader),
        image_token_id=model.integer(token, None, 1 << 22),
    )


def _resampling(table: _Table, default: Resampling) -> Resampling:
    number = table.get("resample", _RESAMPLING.index(default))
    if type(number) is not int or not 0 <= number < len(_RESAMPLING):
        raise table.error("resample", f"a number from 0 to {len(_RESAMPLING) - 1}")
    return _RESAMPLING[number]


def _normalization(table: _Table, reader: _Reader) -> Normalization:
    scale = table.number("rescale_factor", 1 / 255) if table.flag("do_rescale", default=True) else 1.0
    if not table.flag("do_normalize", default=reader.is_normalized):
        return Normalization(scale, (0.0,) * 3, (1.0,) * 3)
    means = table.numbers("image_mean", list(reader.means), 3)
    return Normalization(scale, means, table.numbers("image_std", list(reader.deviations), 3))


def _token(tokens: Mapping[str, Any], key: str, default: str) -> str:
    """Return the text of a control token, which may be an object with the text in `content`."""
    extra = tokens.get("extra_special_tokens")
    found = tokens.get(key, extra.get(key) if isinstance(extra, dict) else None)
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) and found else default
