"""Reads how a checkpoint's images are preprocessed: the table in `processor_config.json`, or else `preprocessor_config.json`,
with the sizes of the vision part of `config.json` and the texts of control tokens in `tokenizer_config.json`; or their equivalents in
GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from jaxserve.checkpoint.files import read_object
from jaxserve.checkpoint.gguf.file import open_gguf
from jaxserve.checkpoint.gguf.mmproj import open_mmproj
from jaxserve.checkpoint.preprocessing import covering, joined, sliced, tiles, whole
from jaxserve.checkpoint.preprocessing.table import Geometry, Table
from jaxserve.checkpoint.renamed import without_speech
from jaxserve.model_config.preprocessing.images import ImageProcessorConfig, Resampling
from jaxserve.model_config.vision import Normalization

_RESAMPLING: Final[tuple[Resampling, ...]] = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Filters in the order of Pillow's numbers."""
_OWN, _JOINT = "preprocessor_config.json", "processor_config.json"
FILES: Final = (_OWN, _JOINT)
"""Files of a checkpoint that describe preprocessing."""
_TOKEN_IDS: Final = ("image_token_id", "image_token_index", "media_placeholder_token_id")
"""Keys of the token that stands for one embedding, in configs of different families."""
_OUTER: Final = (tiles.HAS_MARKS, tiles.PLACEHOLDER, joined.ASPECT, *tiles.FIRST_LFM2_VL)
"""Keys of `processor_config.json` beside the table that change the text or the tiles of an image."""


def read_image_processor(directory: Path, mmproj: Path | None = None) -> ImageProcessorConfig | None:
    """Read the preprocessing of the checkpoint in `directory`; None if it describes none.

    mmproj: the file of the image encoder, if `directory` is the GGUF file of a text model. Raises CheckpointError naming file and
    key for a value that is not supported.
    """
    if mmproj is not None:
        tower, text = open_mmproj(mmproj), open_gguf(directory)
        return _read(Table(mmproj, tower.preprocessing()), tower.config(text), tower.tokens(text))
    own, path = directory / _OWN, directory / _JOINT
    joint = read_object(path) if path.is_file() else {}
    table: Any = joint.get("image_processor")
    if table is None and own.is_file():
        table, path = read_object(own), own
    config = directory / "config.json"
    if not isinstance(table, dict) or not config.is_file():
        return None
    tokens = directory / "tokenizer_config.json"
    outer = {key: joint[key] for key in _OUTER if key in joint}
    table = {key: value for key, value in {**table, **outer}.items() if value is not None}
    table = whole.with_our_names(path, table)
    whole_config = without_speech(read_object(config))
    return _read(Table(path, table), whole_config, read_object(tokens) if tokens.is_file() else {})


class _Reader(NamedTuple):
    """Function that reads what differs between processors, and defaults of what they share."""

    geometry: Callable[[Table, Table, Mapping[str, Any]], Geometry]
    resampling: Resampling
    means: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviations: tuple[float, float, float] = (0.5, 0.5, 0.5)
    is_normalized: bool = True
    is_always_resized: bool = False
    """True if `do_resize` changes nothing."""
    has_rounded_pixels: bool = False
    """True if normalised values are rounded to bfloat16."""


_QWEN: Final = _Reader(whole.areas, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS)
_GLM: Final = _Reader(whole.frames, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS)
_GEMMA4: Final = _Reader(whole.budget, "bicubic", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), is_normalized=False)
_READERS: Final[Mapping[str, _Reader]] = {
    "Idefics3ImageProcessor": _Reader(tiles.tiles, "lanczos"),
    "SmolVLMImageProcessor": _Reader(tiles.tiles, "lanczos"),
    "Qwen2VLImageProcessor": _QWEN,
    "Qwen2_5_VLImageProcessor": _QWEN,  # in early copies of Qwen2.5-VL; transformers lacks it, too, and takes that of the model
    "Qwen3VLImageProcessor": _QWEN,
    "CohereCompassImageProcessor": _QWEN._replace(geometry=whole.compass_areas),
    "Cosmos3EdgeImageProcessor": _Reader(whole.edge_frames, "bicubic"),
    "VideoLlama3ImageProcessor": _Reader(whole.averaged, "bicubic"),
    "Gemma3ImageProcessor": _Reader(whole.fixed, "bilinear"),
    "Glm4vImageProcessor": _GLM,
    "Glm46VImageProcessor": _GLM,
    "PaddleOCRVLImageProcessor": _Reader(whole.enlarged, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "CLIPImageProcessor": _Reader(whole.plain, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "LlavaNextImageProcessor": _Reader(joined.joined, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "LlavaOnevisionImageProcessor": _Reader(joined.bounded, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "LlavaImageProcessor": _Reader(whole.plain, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "Ovis2ImageProcessor": _Reader(covering.covering, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "GotOcr2ImageProcessor": _Reader(tiles.grid, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "SiglipImageProcessor": _Reader(whole.plain, "bicubic"),
    "Cohere2VisionImageProcessor": _Reader(tiles.nearest_grid, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "Llama4ImageProcessor": _Reader(tiles.canvas, "bilinear", has_rounded_pixels=True),
    "GraniteDoclingImageProcessor": _Reader(tiles.pages, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "Lfm2VlImageProcessor": _Reader(tiles.tiled_areas, "bilinear", is_always_resized=True),
    "MiniCPMV4_6ImageProcessor": _Reader(sliced.sliced, "bicubic"),
    "PixtralImageProcessor": _Reader(whole.limited, "bicubic", whole.CLIP_MEANS, whole.CLIP_DEVIATIONS),
    "MuseGlimmerImageProcessor": _Reader(whole.nearest_blocks, "lanczos"),
    "Kimi_K25ImageProcessor": _Reader(whole.padded, "bicubic"),
    "Gemma4ImageProcessor": _GEMMA4,
    "Gemma4UnifiedImageProcessor": _GEMMA4._replace(geometry=whole.merged_budget),
}
"""By `image_processor_type`, which transformers may extend by the kind of its implementation."""
_OF_MODELS: Final[Mapping[str, str]] = {
    "lfm2_vl": "Lfm2VlImageProcessor",
    "lfm3_vl": "Qwen2VLImageProcessor",
    "lighton_ocr": "PixtralImageProcessor",
    "qianfan_ocr": "GotOcr2ImageProcessor",
}
"""Processors of models that have none of their own in transformers, by `model_type`: they are taken if a checkpoint names none, or one that
transformers does not have, such as that of LFM3-VL, which is code beside the published checkpoint."""


def _read(table: Table, config: Mapping[str, Any], tokens: Mapping[str, Any]) -> ImageProcessorConfig:
    name, model_type = (str(each) for each in (table.get("image_processor_type", ""), config.get("model_type")))
    reader = _READERS.get(name.removesuffix("Fast").removesuffix("Pil")) or _READERS.get(_OF_MODELS.get(model_type, ""))
    if reader is None:
        raise table.error("image_processor_type", f"one of {', '.join(_READERS)}")
    if not (reader.is_always_resized or table.flag("do_resize", default=True)):
        raise table.error("do_resize", "true")
    model = Table(table.path.parent / "config.json", config)
    token = next((key for key in _TOKEN_IDS if config.get(key) is not None), _TOKEN_IDS[1])
    geometry = reader.geometry(table, model, tokens)
    return ImageProcessorConfig(
        sizes=geometry.sizes,
        patch_size=geometry.patch_size,
        merge=geometry.merge,
        markup=geometry.markup,
        window=geometry.window,
        inner_merge=geometry.inner_merge,
        has_class_token=geometry.has_class_token,
        mark_token_ids=geometry.mark_token_ids,
        resampling=read_resampling(table, reader.resampling),
        normalization=read_normalization(
            table,
            reader.means,
            reader.deviations,
            is_normalized=reader.is_normalized,
            has_rounded_pixels=reader.has_rounded_pixels,
        ),
        image_token_id=model.integer(token, None, 1 << 22),
    )


def read_resampling(table: Table, default: Resampling) -> Resampling:
    """Read the filter of resizing. Raises CheckpointError."""
    number = table.get("resample", _RESAMPLING.index(default))
    if type(number) is not int or not 0 <= number < len(_RESAMPLING):
        raise table.error("resample", f"a number from 0 to {len(_RESAMPLING) - 1}")
    return _RESAMPLING[number]


def read_normalization(
    table: Table,
    means: tuple[float, ...],
    deviations: tuple[float, ...],
    *,
    is_normalized: bool = True,
    has_rounded_pixels: bool = False,
) -> Normalization:
    """Read how pixels become numbers; what is given are the defaults. Raises CheckpointError."""
    scale = table.number("rescale_factor", 1 / 255) if table.flag("do_rescale", default=True) else 1.0
    if not table.flag("do_normalize", default=is_normalized):
        return Normalization(scale, (0.0,) * 3, (1.0,) * 3)
    return Normalization(
        scale,
        table.numbers("image_mean", list(means), 3),
        table.numbers("image_std", list(deviations), 3),
        is_rounded=has_rounded_pixels,
    )
