"""Models that read images against transformers, on tiny checkpoints in float32: pixels, features, logits and tokens."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve_kernels.native.build import BuildError, build

from jaxserve.errors import CheckpointError
from jaxserve.frontend.images.positions import image_spans, mrope_positions
from jaxserve.frontend.images.processor import EncoderItem, ProcessedImage, _crops, process_image
from jaxserve.model_config.preprocessing.images import FixedSize, ImageProcessorConfig
from jaxserve.runner.images.encoder import block_tokens
from jaxserve.tokenizer.tokenizer import load_tokenizer
from tests.models.crops import CHOSEN, CROPPED_SIZES, PAN_AND_SCAN, TEXT
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import processor_of
from tests.models.vision_model import PROMPTS, SIZES, VisionGolden, VisionModel, process

NAMES = sorted(path.parent.name for path in (DATA / "vision").glob("*/golden.npz"))
WITH_SECTIONS = [name for name in NAMES if name.startswith(("qwen", "glm", "paddleocr", "cosmos3", "cohere_compass"))]
IN_ALL_VERSIONS = ("gemma4_vision_odd_tiny", "qwen3_5_moe_vision_odd_tiny", "smolvlm_tiny")
"""Both kinds of attention, positions in three sections with experts and states, and tiles."""
IN_CI = [
    name for name in NAMES if name in IN_ALL_VERSIONS or name.replace("_odd_", "_") not in NAMES or "_odd_" not in name
]
GENERATING = [*IN_ALL_VERSIONS, "gemma3_vision_tiny", "gemma4_vision_tiny", "idefics3_tiny", "qwen3_vl_tiny"]
"""Generate tokens after images in CI: each kind of attention and of positions, and layers that get features of the tower."""
COMPUTED = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]
"""NAMES for tests that compile: second shapes are computed by `make exhaustive`."""
IN_BFLOAT16 = ("gemma4_vision_odd_tiny", "mistral3_vision_tiny", "qwen2_5_vl_tiny", "qwen3_vl_tiny", "smolvlm_tiny")
OF_TEMPLATES = {
    **dict.fromkeys(("qwen", "cosmos3", "hyperclovax", "video"), ("<|vision_start|>", "<|vision_end|>")),
    "cohere_compass": ("<|VISION_START|>", "<|VISION_END|>"),
    "exaone": ("<|vision_start|>", "<|vision_end|>"),
    "lfm3": ("<|vision_start|>", "<|vision_end|>"),
    "paddleocr": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
}
"""Marks that chat templates write around an image, by the start of a model's name."""
NUM_PATCHES = {
    "gemma3_vision_tiny": 216,
    "mistral3_vision_odd_tiny": 405,
    "lighton_ocr_odd_tiny": 405,
    "paddleocr_vl_odd_tiny": 405,
    "gemma4_vision_tiny": 720,
    "gemma4_vision_odd_tiny": 1620,
    "internvl_tiny": 136,
    "internvl_odd_tiny": 296,
    "aya_vision_odd_tiny": 576,
    "cohere2_vision_odd_tiny": 432,
    "lfm2_vl_odd_tiny": 405,
    "llama4_vision_tiny": 204,
    "llama4_vision_odd_tiny": 444,
    "granite_docling_tiny": 160,
    "granite_docling_odd_tiny": 432,
    "llava_tiny": 68,
    "minicpm_v4_6_tiny": 608,
    "llava_padded_tiny": 51,
    "qianfan_ocr_tiny": 136,
    "qianfan_ocr_odd_tiny": 296,
    "llava_siglip_odd_tiny": 100,
    "llava_next_tiny": 221,
    "llava_next_odd_tiny": 160,
    "llava_onevision_tiny": 224,
    "llava_onevision_odd_tiny": 576,
    "vipllava_tiny": 51,
    "vipllava_odd_tiny": 78,
    "ovis2_tiny": 240,
    "ovis2_odd_tiny": 176,
}
"""Patches of one encoder call: those of all pictures and padding, whole images where they are alike; 400 where not listed."""


def num_patches(name: str) -> int:
    return NUM_PATCHES.get(name, 400)


@cache
def golden_of(name: str) -> VisionGolden:
    return VisionGolden(name)


@cache
def model_of(name: str) -> VisionModel:
    return VisionModel(golden_of(name).path)


@cache
def images_of(name: str, count: int = 1) -> tuple[ProcessedImage, ...]:
    """Return all pictures as a prompt with `count` of them has them."""
    return tuple(process(golden_of(name).path, index, is_alone=count == 1) for index in range(len(SIZES)))


@cache
def rows_of(name: str, count: int = 1) -> tuple[np.ndarray, ...]:
    """Encode the items of all pictures in one call; return the rows of each picture. count: as in `images_of`."""
    images = images_of(name, count)
    rows = iter(model_of(name).encode([item for image in images for item in image.items], num_patches(name)))
    return tuple(np.concatenate([next(rows) for _ in image.items]) for image in images)


@pytest.mark.parametrize("index", range(len(SIZES)))
@pytest.mark.parametrize("name", NAMES)
def test_pixels_and_numbers_of_tokens_equal_those_of_transformers_with_pillow(name: str, index: int) -> None:
    arrays, image = golden_of(name).arrays, images_of(name)[index]
    pixels = np.concatenate([by_token(item) for item in image.items])
    assert np.array_equal(pixels, arrays[f"pixels_{index}"])
    assert image.num_tokens == len(arrays[f"features_{index}"])


def by_token(item: EncoderItem) -> np.ndarray:
    """Return the patches of an image, without a class token, block by block in the order of its tokens."""
    is_patch = item.positions[:, 1] >= 0
    patches, positions = item.patches[is_patch], item.positions[is_patch]
    if item.sources is not None:  # tiles in their order
        return patches
    block = len(patches) // item.num_tokens
    order = np.argsort(block_tokens(positions, block))
    return patches.reshape(item.num_tokens, block, -1)[order].reshape(patches.shape)


@pytest.mark.parametrize("name", NAMES)
def test_the_default_image_processor_differs_by_one_shade_where_pixels_are_resized_once(name: str) -> None:
    """torchvision rounds weights to 16 bits, Pillow to 32: tiles, which are resized up to three times, add it up, as do both axes of a few
    pixels of Cohere 2 Vision, Aya Vision, PaliGemma and MiniCPM-V."""
    changes = np.concatenate([golden_of(name).arrays[f"default_{index}"].ravel() for index in range(len(SIZES))])
    far = np.abs(changes) > 1
    assert np.abs(changes).max() <= 4
    assert far.mean() < (
        5e-4 if name.startswith(("smolvlm", "idefics3", "granite", "cohere2", "aya", "paligemma", "minicpm")) else 1e-9
    )


@pytest.mark.parametrize("count", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_tokens_of_transformers(name: str, count: int) -> None:
    assert prompt_of(name, count).tolist() == golden_of(name).arrays[f"ids_{count}"].tolist()


def prompt_of(name: str, count: int) -> np.ndarray:
    """Return the tokens of a golden's prompt as our tokenizer and processor make them."""
    text, chosen = PROMPTS[count]
    before, after = next((marks for start, marks in OF_TEMPLATES.items() if name.startswith(start)), ("", ""))
    numbers = (processor_of(golden_of(name).path).markup.number.format(number=number) for number in range(count))
    images = [next(numbers) + images_of(name, count)[index].text for index in chosen]
    places = [f"{before}{image}{after}" for image in images]
    text = text.format(*places)
    if name.startswith("paligemma"):  # as its chat template
        last = text.rindex("<image>") + len("<image>")
        text = f"{text[:last]}<|endoftext|>{text[last:]}\n"
    return model_of(name).tokens(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTED)
def test_features_of_pictures_in_one_call_equal_transformers(name: str) -> None:
    for index, rows in enumerate(rows_of(name)):
        np.testing.assert_allclose(rows, golden_of(name).arrays[f"features_{index}"], atol=1e-4, rtol=0)


TILES = {
    "gemma3_vision_tiny": (18, 72, 80),
    "llava_next_tiny": (20,),
    "llava_onevision_tiny": (24,),
    "llava_tiny": (20,),
    "qwen2_5_vl_tiny": (20, 128),
    "qwen3_vl_moe_odd_tiny": (100, 128),
    "smolvlm_tiny": (8, 400),
}
"""Patches of a tile: parts of an image, several, and neither where images are alike; parts of a call and more than it has."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in TILES.items() for size in sizes])
def test_features_of_a_tower_that_runs_in_tiles_equal_those_of_one_program(name: str, size: int) -> None:
    """The other towers run in tiles in tests/engine/test_images.py."""
    items = [item for image in images_of(name) for item in image.items]
    rows = np.concatenate(model_of(name).encode_in_tiles(items, num_patches(name), size))
    np.testing.assert_allclose(rows, np.concatenate(rows_of(name)), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTED)
def test_features_of_a_picture_do_not_depend_on_those_beside_it(name: str) -> None:
    for image, together in zip(images_of(name), rows_of(name), strict=True):
        alone = np.concatenate(model_of(name).encode(list(image.items), num_patches(name)))
        np.testing.assert_allclose(alone, together, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_vision_odd_tiny", "qwen2_5_vl_tiny", "qwen3_vl_moe_odd_tiny", "smolvlm_tiny"])
def test_native_kernels_give_the_features_of_transformers_and_the_same_bits_for_a_picture_alone(name: str) -> None:
    """Towers with clipped matmuls, with images of any size, and with images that are alike."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    model, size = VisionModel(golden_of(name).path, "native"), num_patches(name)
    together = iter(model.encode([item for image in images_of(name) for item in image.items], size))
    for index, image in enumerate(images_of(name)):
        rows = np.concatenate([next(together) for _ in image.items])
        np.testing.assert_allclose(rows, golden_of(name).arrays[f"features_{index}"], atol=1e-4, rtol=0)
        np.testing.assert_array_equal(np.concatenate(model.encode(list(image.items), size)), rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param("gemma4_vision_odd_tiny", marks=pytest.mark.exhaustive), "qwen3_vl_moe_odd_tiny", "smolvlm_tiny"],
)
def test_tiles_of_native_kernels_give_the_same_bits_for_a_picture_alone(name: str) -> None:
    """Pictures alone lie elsewhere in a tile, or in other tiles."""
    try:
        build()
    except BuildError as error:
        pytest.skip(f"native kernels: {error}")
    model, size, images = VisionModel(golden_of(name).path, "native"), num_patches(name), images_of(name)
    tile = 8 if name == "smolvlm_tiny" else 25 * model.vision.block
    together = iter(model.encode_in_tiles([item for image in images for item in image.items], size, tile))
    for index, image in enumerate(images):
        rows = np.concatenate([next(together) for _ in image.items])
        np.testing.assert_allclose(rows, golden_of(name).arrays[f"features_{index}"], atol=1e-4, rtol=0)
        alone = np.concatenate(model.encode_in_tiles(list(image.items), size, tile))
        np.testing.assert_array_equal(alone, rows)
        whole = np.concatenate(model.encode_in_tiles(list(image.items), size, size))  # as without replies
        np.testing.assert_allclose(whole, rows, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_a_tower_of_accelerators_computes_in_bfloat16_near_the_features_of_float32(name: str) -> None:
    """On GPUs and TPUs activations of a bfloat16 checkpoint are bfloat16, while norms, shares of attention and sums are float32."""
    model, items = (
        VisionModel(golden_of(name).path, dtype="bfloat16"),
        [item for image in images_of(name) for item in image.items],
    )
    rows = model.encode(items, num_patches(name))
    assert all(each.dtype == jnp.bfloat16 for each in rows)
    found, expected = np.concatenate(rows).astype(np.float32), np.concatenate(rows_of(name))
    spread = expected.std()
    assert np.sqrt(np.square(found - expected).mean()) < 0.03 * spread
    assert np.abs(found - expected).max() < 0.3 * spread


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in IN_CI if name not in GENERATING])
def test_logits_after_images_equal_transformers(name: str) -> None:
    arrays, (_, chosen) = golden_of(name).arrays, PROMPTS[3]
    items = [item for index in chosen for item in images_of(name, 3)[index].items]
    logits, _ = model_of(name).run(arrays["ids_3"], items, [rows_of(name, 3)[index] for index in chosen], 1)
    np.testing.assert_allclose(logits, arrays["logits_3"], atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.versions]) if name in IN_ALL_VERSIONS[1:] else name for name in GENERATING]
    + [pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES if name not in GENERATING],
)
def test_logits_and_greedy_tokens_after_images_equal_transformers(name: str) -> None:
    arrays = golden_of(name).arrays
    for count, (_, chosen) in PROMPTS.items():
        items = [item for index in chosen for item in images_of(name, count)[index].items]
        rows = [rows_of(name, count)[index] for index in chosen]
        outputs = arrays[f"outputs_{count}"]
        logits, found = model_of(name).run(arrays[f"ids_{count}"], items, rows, len(outputs))
        np.testing.assert_allclose(logits, arrays[f"logits_{count}"], atol=1e-3, rtol=0)
        assert found.tolist() == outputs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["idefics3_tiny", *(name for name in NAMES if name.startswith("gemma"))])
def test_another_picture_with_as_many_tokens_gives_another_reply(name: str) -> None:
    """A golden whose reply does not depend on its picture would prove nothing."""
    arrays, rows = golden_of(name).arrays, rows_of(name)
    assert rows[0].shape == rows[1].shape
    outputs = arrays["outputs_1"]
    _, found = model_of(name).run(arrays["ids_1"], list(images_of(name)[0].items), [rows[1]], len(outputs))
    assert (found != outputs).sum() >= 6


@pytest.mark.parametrize("count", PROMPTS)
@pytest.mark.parametrize("name", WITH_SECTIONS)
def test_three_positions_of_each_token_equal_those_of_transformers(name: str, count: int) -> None:
    arrays = golden_of(name).arrays
    config = processor_of(golden_of(name).path)
    tokens = arrays[f"ids_{count}"]
    items = [item for index in PROMPTS[count][1] for item in images_of(name)[index].items]
    spans = image_spans(tokens, config.image_token_id, [item.num_tokens for item in items])
    positions, delta = mrope_positions(len(tokens), spans, [item.grid for item in items], config.merge)
    assert positions.tolist() == arrays[f"positions_{count}"].tolist()
    assert [delta] == arrays[f"delta_{count}"].tolist()


CROPPED = "gemma3_vision_tiny"


@cache
def crops() -> dict[str, np.ndarray]:
    """Return the arrays of crops.npz."""
    with np.load(golden_of(CROPPED).path / "crops.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def cropping(rule: dict[str, Any], folder: Path) -> ImageProcessorConfig:
    """Return the preprocessing of the checkpoint with a rule for crops in its config, which `folder` takes."""
    shutil.copytree(golden_of(CROPPED).path, folder, dirs_exist_ok=True)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | rule))
    return processor_of(folder)


def cropped_images(folder: Path) -> list[ProcessedImage]:
    """Return the pictures with crops by the rule of the golden."""
    config = cropping(PAN_AND_SCAN, folder)
    return [process_image(picture(*size, seed), config) for seed, size in enumerate(CROPPED_SIZES)]


def test_crops_of_images_have_the_pixels_and_prompts_of_transformers(tmp_path: Path) -> None:
    images = cropped_images(tmp_path)
    for index, image in enumerate(images):
        pixels = np.concatenate([item.patches for item in image.items])
        assert np.array_equal(pixels, crops()[f"pixels_{index}"])
    text = TEXT.format(*(images[index].text for index in CHOSEN))
    assert load_tokenizer(tmp_path).encode(text) == crops()["ids"].tolist()


@pytest.mark.parametrize(("rule", "key"), [(PAN_AND_SCAN, "tiny_num_crops"), ({"do_pan_and_scan": True}, "num_crops")])
def test_pictures_of_any_size_have_as_many_crops_as_with_transformers(
    rule: dict[str, Any], key: str, tmp_path: Path
) -> None:
    config = cropping(rule, tmp_path)
    assert isinstance(config.sizes, FixedSize)
    found = [len(_crops(*map(int, size), config.sizes.crops)) for size in crops()["sizes"]]
    assert found == crops()[key].tolist() and max(found) == 4


@pytest.mark.parametrize("values", [{"pan_and_scan_min_crop_size": 0}, {"pan_and_scan_max_num_crops": "4"}])
def test_a_rule_for_crops_that_makes_no_sense_is_refused_with_its_key(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"preprocessor_config.json: {next(iter(values))}: expected an integer"):
        cropping(PAN_AND_SCAN | values, tmp_path)


@pytest.mark.slow
def test_features_logits_and_tokens_of_images_with_crops_equal_transformers(tmp_path: Path) -> None:
    model, images = model_of(CROPPED), cropped_images(tmp_path)
    rows = [np.concatenate(model.encode(list(image.items), num_patches(CROPPED))) for image in images]
    for index, own in enumerate(rows):
        np.testing.assert_allclose(own, crops()[f"features_{index}"], atol=1e-4, rtol=0)
    items, outputs = [item for index in CHOSEN for item in images[index].items], crops()["outputs"]
    logits, found = model.run(crops()["ids"], items, [rows[index] for index in CHOSEN], len(outputs))
    np.testing.assert_allclose(logits, crops()["logits"], atol=1e-3, rtol=0)
    assert found.tolist() == outputs.tolist()
