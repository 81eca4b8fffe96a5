"""Images of LLaVA-NeXT, LLaVA-OneVision and ViP-LLaVA: grids, tiles and tokens of any picture, and keys that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxserve.frontend.images.joined import joined_sources
from jaxserve.frontend.images.prepared import prepared_item, with_bounded_area
from jaxserve.frontend.images.processor import process_image
from jaxserve.model_config.preprocessing.images import JoinedTiles
from jaxserve.runner.images.encoder import placed_sources
from tests.models.goldens import DATA
from tests.models.pictures import picture
from tests.models.vision_files import changed, processor_of, vision_of

NEXT, ONE_VISION, VIP = (DATA / "vision" / f"{name}_tiny" for name in ("llava_next", "llava_onevision", "vipllava"))
SIZES = ((80, 50), (31, 90), (7, 5), (28, 28), (200, 33), (1, 60), (640, 480), (33, 1000))


@pytest.mark.parametrize(
    ("model", "name"), [(NEXT, "LlavaNextImageProcessorPil"), (ONE_VISION, "LlavaOnevisionImageProcessorPil")]
)
def test_tiles_and_tokens_of_pictures_of_any_size_equal_those_of_transformers(model: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, name).from_pretrained(model)
    keys = {"patch_size": 7} if model == NEXT else {"num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_2"}
    processor_class = getattr(transformers, name.replace("ImageProcessorPil", "Processor"))
    processor = processor_class.__new__(processor_class)
    vars(processor).update(keys, image_processor=theirs, num_additional_image_tokens=0)
    config = processor_of(model)
    assert isinstance(config.sizes, JoinedTiles)
    side = config.sizes.tile
    own = side // config.patch_size * config.patch_size
    for seed, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed)
        (item,) = process_image(image, config).items
        made = theirs([[image]], do_rescale=False, do_normalize=False)["pixel_values"][0]
        tiles = np.asarray(made, np.uint8)[:, :, :own, :own]
        cut = tiles.reshape(len(tiles), 3, 4, config.patch_size, 4, config.patch_size).transpose(0, 2, 4, 1, 3, 5)
        is_patch = item.positions[:, 1] >= 0
        np.testing.assert_array_equal(item.patches[is_patch], cut.reshape(is_patch.sum(), -1))
        assert item.num_tokens == processor._get_number_of_features(height, width, side, side)


def test_images_that_are_not_alone_are_padded_to_one_tile_as_by_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs, config = transformers.LlavaOnevisionImageProcessorPil.from_pretrained(ONE_VISION), processor_of(ONE_VISION)
    images = [picture(width, height, seed) for seed, (width, height) in enumerate(SIZES[:4])]
    made = theirs([images], do_rescale=False, do_normalize=False)["pixel_values"]
    for image, whole in zip(images, made, strict=True):
        (item,) = process_image(image, config, is_alone=False).items
        pixels = np.asarray(whole[0], np.uint8)[:, :24, :24].reshape(3, 4, 6, 4, 6).transpose(1, 3, 0, 2, 4)
        np.testing.assert_array_equal(item.patches, pixels.reshape(16, -1))
        assert item.num_tokens == 17


def test_the_last_source_of_each_row_is_the_learned_vector_after_all_outputs() -> None:
    sizes = JoinedTiles(4, ((2, 2),))
    places = joined_sources(40, 20, (2, 2), 2, sizes)[
        :, 0
    ]  # half as wide as high: a column of two is a margin, half on each side
    assert places[:4].tolist() == [0, 1, 2, 3]
    assert places[4:].reshape(4, 3).tolist() == [[5, 8, 20], [7, 10, 20], [13, 16, 20], [15, 18, 20]]
    assert placed_sources(np.array([[0], [19], [20]], np.int32), 100, 20, 400).tolist() == [[100], [119], [400]]


def test_equal_tiles_of_images_with_other_margins_are_other_images() -> None:
    """A black margin is cut off, a black part of the picture is not."""
    config = processor_of(NEXT)
    whole, part = Image.new("RGB", (56, 56)), Image.new("RGB", (56, 28))
    items = [process_image(image, config).items[0] for image in (whole, part)]
    kept = [prepared_item(item) for item in items]
    assert len({item.digest for item in kept}) == 2
    assert [item.num_tokens for item in items] == [16 + 8 * 9, 16 + 4 * 9]


def test_a_small_encoder_gets_grids_that_it_holds() -> None:
    config = processor_of(NEXT)
    counts = {}
    for most in (17, 51, 85, 4096):
        bounded = with_bounded_area(config, most)
        (item,) = process_image(picture(80, 70, 0), bounded).items
        counts[most] = len(item.patches)
    assert counts == {17: 17, 51: 51, 85: 85, 4096: 85}


def test_layers_of_features_have_two_names(tmp_path: Path) -> None:
    folder = changed(tmp_path, VIP, vision_feature_layers=[-3, 1])
    file = folder / "config.json"
    table = json.loads(file.read_text())
    assert vision_of(VIP).feature_layers == vision_of(folder).feature_layers
    file.write_text(json.dumps({key: value for key, value in table.items() if key != "vision_feature_layer"}))
    assert vision_of(folder).feature_layers == (1, 1)


def test_towers_have_the_defaults_of_each_class(tmp_path: Path) -> None:
    """Published configs leave out keys that are the same as transformers' defaults."""
    found = []
    for model, size in ((NEXT, 336), (VIP, 336), (ONE_VISION, 384)):
        folder = changed(tmp_path / model.name, model, vision_feature_layer=-1)
        square = {"height": size, "width": size}
        sizes = {"size": square} if model == ONE_VISION else {"size": {"shortest_edge": size}, "crop_size": square}
        for name, values in (("config.json", {"vision_config": {}}), ("preprocessor_config.json", sizes)):
            table = json.loads((folder / name).read_text()) | values
            table.pop("image_grid_pinpoints", None)
            (folder / name).write_text(json.dumps(table))
        vision = vision_of(folder)
        found.append((vision.hidden_size, vision.num_layers, vision.image_patches, vision.most_tiles))
    assert found == [(1024, 24, 577, 5), (1024, 24, 577, 1), (1152, 26, 729, 37)]
